"""``python -m tests.soak --minutes N --seed S``: exits with 0 if nothing was lost or doubled."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import ModuleType

from click import echo
from kombu import Connection

from tests.processes import Processes
from tests.servers.postgresql import Postgresql
from tests.servers.rabbitmq import Rabbitmq, RabbitmqApi
from tests.soak.chaos import APP, Chaos, Roles
from tests.soak.load import Load, Request, plan
from tests.soak.verdict import Verdict, judge, unfinished
from tests.wait import eventually
from tests.watchdog import Watchdog

#: Seconds without progress, when the chaos has ended, after which what is left is stuck. A lease,
#: a backoff and a lost message take less.
PATIENCE = 90.0

#: Messages that no worker can do anything with, sent straight to the queue.
BAD_MESSAGES = 20


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long jobs are recorded")
    parser.add_argument("--seed", type=int, default=1, help="of the jobs and of the chaos")
    parser.add_argument("--jobs", type=int, default=5000, help="requests in all")
    options = parser.parse_args()
    with Watchdog() as watchdog, tempfile.TemporaryDirectory(prefix="outbox-soak-") as folder:
        postgresql = Postgresql.start(watchdog, private=True)
        rabbitmq = Rabbitmq.start(watchdog, private=True)
        processes = Processes(Path(folder), watchdog)
        try:
            requests = plan(options.jobs, options.seed)
            verdict = soak(options, postgresql, rabbitmq, processes, requests)
        finally:
            processes.close()
            rabbitmq.stop()
            postgresql.stop()
    report(verdict)
    return 0 if verdict.is_good else 1


def soak(
    options: argparse.Namespace,
    postgresql: Postgresql,
    rabbitmq: Rabbitmq,
    processes: Processes,
    requests: list[Request],
) -> Verdict:
    """Record, disturb, wait for the end of everything, and look."""
    environment = {
        "SOAK_DATABASE": postgresql.create_database("soak"),
        "SOAK_BROKER": rabbitmq.create_vhost("soak"),
    }
    broker = RabbitmqApi(rabbitmq, "soak", environment["SOAK_BROKER"])
    os.environ.update(environment)
    shop = importlib.import_module(APP)
    shop.outbox.init()
    shop.metadata.create_all(shop.outbox.engine)
    roles = Roles(processes, environment)
    roles.revive()
    eventually(lambda: "celery" in broker.queues(), deadline=60)
    send_bad_messages(environment["SOAK_BROKER"])

    load = Load(shop, requests, options.minutes * 60)
    chaos = Chaos(roles, postgresql, rabbitmq, options.seed)
    started = time.monotonic()
    load.start()
    chaos.start()
    while load.is_alive():
        load.join(10)
        accidents = sum(chaos.happened.values())
        say(started, f"recorded {load.recorded} of {len(requests)}, {accidents} accidents")
        if chaos.error is not None:
            raise chaos.error
    chaos.stop()
    if chaos.error is not None:
        raise chaos.error
    say(
        started,
        f"repeated {load.repeated}; "
        + ", ".join(f"{name}: {n}" for name, n in chaos.happened.items()),
    )
    roles.revive()
    drain(shop, broker, started)
    roles.stop()
    with shop.outbox.engine.connect() as connection:
        return judge(shop, connection, broker, requests)


def send_bad_messages(url: str) -> None:
    """Messages that name a task and have a body that nobody can read."""
    with Connection(url, transport_options={"confirm_publish": True}) as connection:
        producer = connection.Producer()
        for number in range(BAD_MESSAGES):
            headers = {"id": f"bad-message-{number}", "task": "soak.short", "lang": "py"}
            producer.publish(
                b"\xff not JSON",
                routing_key="celery",
                headers=headers,
                content_type="application/json",
                content_encoding="utf-8",
                delivery_mode=2,
            )


def drain(shop: ModuleType, broker: RabbitmqApi, started: float) -> None:
    """Wait until nothing is under way, or nothing becomes less."""
    least, progress = sys.maxsize, time.monotonic()
    while time.monotonic() - progress < PATIENCE:
        with shop.outbox.engine.connect() as connection:
            left = unfinished(shop, connection)
        left += broker.depth("celery")
        if left == 0:
            break
        if left < least:
            least, progress = left, time.monotonic()
        threading.Event().wait(2)
    say(started, "drained" if left == 0 else f"not drained: {left} jobs, rows and messages")


def report(verdict: Verdict) -> None:
    """Print it, the bad things with names."""
    echo(f"\njobs         {verdict.jobs}")
    echo(f"reruns       {verdict.reruns} (bodies that ran again, retries included)")
    for name, found in verdict.bad.items():
        echo(f"{name:<12} {len(found)}")
        for line in found[:10]:
            echo(f"             {line}")
    reasons = ", ".join(f"{reason}: {n}" for reason, n in sorted(verdict.quarantined.items()))
    echo(f"quarantined  {sum(verdict.quarantined.values())} ({reasons})")
    echo("GOOD" if verdict.is_good else "BAD")


def say(started: float, text: str) -> None:
    """One line, with the seconds since the beginning."""
    echo(f"{time.monotonic() - started:6.0f} s  {text}")


if __name__ == "__main__":
    sys.exit(main())
