"""Everything that the parts of the demonstration work with."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from example_project.models import Account
from example_project.play.broker import Broker
from example_project.play.client import Client
from example_project.play.look import Seen
from example_project.play.patience import Patience
from example_project.play.processes import Process, Processes
from example_project.play.report import say
from example_project.settings import Settings

PERIOD = "2026-01"

Found = TypeVar("Found")

WORKER_OPTIONS = (
    # One process that does everything, so that it is the whole worker that dies.
    *("--pool", "solo", "--loglevel", "INFO", "--without-gossip", "--without-mingle"),
    # How soon an idle worker sees that it is asked to end.
    *("--heartbeat-interval", "1"),
)


def job_of(account_id: int) -> str:
    """The id of the job that exports an account's orders."""
    return f"export-{account_id}-{PERIOD}"


@dataclass
class Stage:
    """The processes, and the means to look at what they do.

    Attributes:
        see: looks at a job.
        dispatcher, worker: those that run now.
    """

    settings: Settings
    engine: Engine
    broker: Broker
    processes: Processes
    patience: Patience
    see: Callable[[str], Seen]
    client: Client = field(init=False)
    dispatcher: Process = field(init=False)
    worker: Process = field(init=False)

    def start_web(self) -> None:
        """Start the web server on a free port."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            handle = listening.fileno()
            self.processes.python("web", ["example_project.serve", str(handle)], [handle])
            self.client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}")

    def start_dispatcher(self) -> None:
        """Start ``celery outbox dispatch``."""
        self.dispatcher = self.processes.celery("dispatcher", "outbox", "dispatch")
        say(f"A dispatcher starts (pid {self.dispatcher.pid}).")

    def start_worker(self) -> None:
        """Start ``celery worker``."""
        name = f"worker-{len(self.processes.started)}@localhost"
        arguments = ("worker", "--hostname", name, *WORKER_OPTIONS)
        self.worker = self.processes.celery("worker", *arguments)
        say(f"A worker starts (pid {self.worker.pid}).")

    def request(self, account_id: int) -> tuple[int, dict[str, Any]]:
        """Ask for an export over HTTP."""
        body = {"account_id": account_id, "period": PERIOD}
        status, answer = self.client.post("/exports", body)
        say(f"POST /exports {json.dumps(body)}")
        say(f"  -> {status} {json.dumps(answer)}")
        return status, answer

    def begin_import(self, account_id: int) -> None:
        """Say that orders of an account are being imported, and never end."""
        with Session(self.engine) as session, session.begin():
            session.get_one(Account, account_id).importing = True
        say(f"Orders of account {account_id} are being imported: each attempt fails for now.")

    def until(self, what: str, job_id: str, check: Callable[[Seen], bool]) -> Seen:
        """Look at a job until ``check`` likes what it sees."""

        def found() -> Seen | None:
            seen = self.see(job_id)
            return seen if check(seen) else None

        return self.patience.until(what, found)

    def wait_for_death(self, process: Process, where: str) -> None:
        """Wait until a process has been killed."""
        self.patience.until(f"the {process.title} to die", lambda: process.killed)
        say(f"SIGKILL: the {process.title} (pid {process.pid}) is dead, {where}.")

    def stop_worker(self) -> None:
        """End the worker in good order."""
        self.worker.terminate()
        self.patience.until("the worker to end", lambda: self.worker.ended)

    def outbox_command(self, *arguments: str) -> Any:
        """What ``celery outbox ... --json`` prints."""
        app = ("celery", "-A", "example_project.celery_app", "outbox")
        done = subprocess.run(
            [sys.executable, "-m", *app, *arguments, "--json"],
            env=self.processes.environment,
            capture_output=True,
            check=True,
            timeout=30,
        )
        return json.loads(done.stdout)
