"""A pgqueuer worker: ``python -m benchmarks.programs.pgqueuer_worker BATCH``."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.models import Job

from benchmarks.programs.traces import note_run, note_start


async def main(batch: int) -> None:
    """Run until it is killed."""
    connection = await asyncpg.connect(os.environ["BENCH_LIBPQ"])
    worker = PgQueuer.from_asyncpg_connection(connection)

    @worker.entrypoint("bench.noop")
    async def noop(job: Job) -> None:
        note_run()

    @worker.entrypoint("bench.stamp")
    async def stamp(job: Job) -> None:
        note_start(json.loads(job.payload or b"")["number"])

    await worker.run(batch_size=batch)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
