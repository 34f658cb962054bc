"""The one task: the orders of an account in a month, as a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from celery_outbox import RetryableError
from example_project.celery_app import app, settings
from example_project.models import Account, Order, Run, open_database
from example_project.period import BadPeriod, days_of

Sessions = sessionmaker(open_database(settings.database_url))

HEADER = ("order", "date", "product", "quantity", "unit_price", "total")


class StillImporting(RetryableError):
    """The account's orders are not complete; they may be at the next attempt."""


@app.task(bind=True, max_attempts=3, result_key="reports/{job_id}.csv", permanent_for=(BadPeriod,))
def export(self: Any, account_id: int, period: str) -> str:
    """Write ``reports/<job id>.csv``; returns the file's name."""
    with Sessions.begin() as session:
        session.add(Run(job_id=self.request.id, attempt=self.request.retries + 1))
    with Sessions() as session:
        if session.scalar(select(Account.importing).where(Account.id == account_id)):
            raise StillImporting(f"orders of account {account_id} are being imported")
        report = as_csv(orders_of(session, account_id, period))
    return self.write_result(report)


def orders_of(session: Session, account_id: int, period: str) -> Iterable[Order]:
    """The orders of an account in a month, oldest first."""
    first, end = days_of(period)
    statement = (
        select(Order)
        .where(Order.account_id == account_id, Order.date >= first, Order.date < end)
        .order_by(Order.date, Order.id)
    )
    return session.scalars(statement)


def as_csv(orders: Iterable[Order]) -> str:
    """The report's text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for order in orders:
        price, total = order.unit_price_cents, order.quantity * order.unit_price_cents
        writer.writerow(
            (order.id, order.date, order.product, order.quantity, _money(price), _money(total))
        )
    return text.getvalue()


def _money(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"
