"""Counts members of chords that ended without a worker that could say so: cancelled while they
waited, refused by the broker, given up when their worker was gone."""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery
from celery.app.task import Context

from celery_outbox.context import reporting
from celery_outbox.core.chords import LAST, Part
from celery_outbox.core.states import State
from celery_outbox.execute.chord_places import Member, places_in
from celery_outbox.execute.chords import Chords
from celery_outbox.log import log_event
from celery_outbox.operate.reports import error_of, request_of, tell_end
from celery_outbox.store import chords as store
from celery_outbox.store import job as jobs
from celery_outbox.store.job import Job

logger = logging.getLogger("celery_outbox.operate")

#: Members that one run counts.
BATCH = 100


class Members:
    """Finds and counts members that nobody has counted.

    Arguments:
        app: the Celery app, whose result backend hears of failures.
        chords: counts.
        after: seconds since the end of a job, for which its worker may still count it.
    """

    def __init__(self, app: Celery, chords: Chords, *, after: float) -> None:
        self._app = app
        self._chords = chords
        self._database = chords.database
        self._after = after

    def count(self) -> int:
        """Count what is due; returns how many jobs that were."""
        found = self._database.read(
            lambda c: store.uncounted(c, self._database.tables, after=self._after, limit=BATCH)
        )
        return sum(self._count(*each) for each in found)

    def _count(self, chord_id: str, job_id: str, position: int | None) -> bool:
        try:
            job = self._database.read(lambda c: jobs.get(c, self._database.tables, job_id))
            if job is not None:
                with reporting(job_id):
                    self._end(chord_id, job, position)
        except Exception:  # the result backend may be anything; it is done again
            log_event(logger, logging.ERROR, "outbox.member_not_counted", exc_info=True, job=job_id)
            return False
        return True

    def _end(self, chord_id: str, job: Job, position: int | None) -> None:
        backend = self._app.backend
        request = request_of(self._app, job)
        if job.state is State.RELAYED:
            # Its end is known to another service.
            self._chords.forget(chord_id, job.id)
        elif position is not None:
            # Recorded for another chord, or for none.
            member = Member(chord_id, job.id, position)
            request.chord = None
            self._chords.end(backend, member, self._part(backend, job), request, ended=[job.id])
        elif job.state is State.SUCCEEDED:
            if request.chord:
                member = Member(chord_id, job.id, _position(request))
                self._chords.end(backend, member, self._part(backend, job), request, ended=[job.id])
            self._chords.forget(chord_id, job.id)
        else:
            self._fail(backend, chord_id, job, request)

    def _fail(self, backend: Any, chord_id: str, job: Job, request: Context) -> None:
        """Report a failure as a worker would have, unless one has."""
        members = [place for step in request.chain or () for place in places_in(step)]
        if request.chord or not members:
            members.append(Member(chord_id, job.id, _position(request)))
        ids = {member.job_id for member in members if member.chord_id == chord_id}
        reported = self._database.read(
            lambda c: store.has_counted(c, self._database.tables, chord_id, ids)
        )
        error = error_of(job)
        if not reported:
            tell_end(self._app, job, request)
        for member in members:
            # Celery does not go down the chain of a job that was revoked; and whoever counted the
            # last member may not have lived to say that the chord has failed.
            part = self._chords.part_of(backend, member.job_id, error, failed=True)
            self._chords.end(backend, member, part, request, ended=[job.id])
        self._chords.forget(chord_id, job.id)

    def _part(self, backend: Any, job: Job) -> Part:
        if job.state is State.SUCCEEDED:
            return Part(job.id, True, job.result, job.result_type)
        return self._chords.part_of(backend, job.id, error_of(job), failed=True)


def _position(request: Context) -> int:
    return LAST if request.group_index is None else int(request.group_index)
