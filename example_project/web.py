"""The HTTP side: takes requests for exports, and says where each one is."""

from __future__ import annotations

from typing import Any

from flask import Flask, request
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from celery_outbox import UnknownJob
from example_project.celery_app import outbox
from example_project.models import Account, ExportRequest
from example_project.period import BadPeriod, days_of
from example_project.tasks import Sessions, export

Answer = tuple[dict[str, Any], int]

#: The largest number that the account column holds.
MAX_ID = 2**31 - 1

web = Flask("example_project")


@web.post("/exports")
def request_export() -> Answer:
    """``{"account_id": 42, "period": "2026-01"}`` -> 202 and the job's id."""
    body = request.get_json(force=True, silent=True)
    if not isinstance(body, dict):
        return _refuse('send JSON such as {"account_id": 42, "period": "2026-01"}')
    account_id, period = body.get("account_id"), body.get("period")
    if not isinstance(account_id, int) or isinstance(account_id, bool):
        return _refuse("account_id is missing or not a whole number")
    if not isinstance(period, str):
        return _refuse("period is missing or not a text such as 2026-01")
    try:
        days_of(period)
    except BadPeriod as error:
        return _refuse(str(error))
    job_id = f"export-{account_id}-{period}"
    try:
        with Sessions.begin() as session:
            if not 0 <= account_id <= MAX_ID or session.get(Account, account_id) is None:
                return _refuse(f"there is no account {account_id}", 404)
            new = _record(session, job_id, account_id, period)
    except IntegrityError:
        # Somebody else asked for the same at the same moment, and was first.
        new = False
    return {"job_id": job_id, "new": new, "status_url": f"/jobs/{job_id}"}, 202


def _record(session: Session, job_id: str, account_id: int, period: str) -> bool:
    """Record the request and its job in one transaction; returns whether they are new."""
    if session.get(ExportRequest, job_id) is not None:
        return False
    session.add(ExportRequest(job_id=job_id, account_id=account_id, period=period))
    session.flush()
    with outbox.use(session):
        export.apply_async((account_id, period), task_id=job_id)
    return True


@web.get("/jobs/<job_id>")
def show_job(job_id: str) -> Answer:
    """Where the job is, what became of it and why."""
    try:
        return outbox.job(job_id).as_json(), 200
    except UnknownJob as error:
        return _refuse(str(error), 404)


def _refuse(error: str, status: int = 400) -> Answer:
    return {"error": error}, status
