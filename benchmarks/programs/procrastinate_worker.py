"""A procrastinate worker: ``python -m benchmarks.programs.procrastinate_worker CONCURRENCY``."""

from __future__ import annotations

import asyncio
import os
import sys

from procrastinate import App, PsycopgConnector

from benchmarks.programs.traces import note_run, note_start

app = App(connector=PsycopgConnector(conninfo=os.environ["BENCH_LIBPQ"]))


# Coroutines, which it runs in its own loop: a plain function would go to a thread.
@app.task(name="bench.noop")
async def noop(number: int, period: str) -> None:
    """Do nothing, and be counted."""
    note_run()


@app.task(name="bench.stamp")
async def stamp(number: int, period: str) -> None:
    """Say when it began."""
    note_start(number)


async def main(concurrency: int) -> None:
    """Run until it is killed."""
    async with app.open_async():
        await app.run_worker_async(concurrency=concurrency)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
