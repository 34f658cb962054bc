"""kombu's filesystem transport: each message is a file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from celery import Celery

from celery_outbox import Outbox
from example_project.configuration import QUEUE
from example_project.play.broker import Broker
from example_project.play.patience import Patience


class FilesystemBroker(Broker):
    """Folders below ``folder``."""

    redelivery = (
        "This transport forgets a message once it is read. In the place of a real broker,\n"
        "  the demonstration moves the message's file back into the queue's folder."
    )

    def __init__(self, app: Celery, outbox: Outbox, folder: Path) -> None:
        super().__init__(app, outbox)
        self._folder = folder

    def clear(self) -> None:
        """Begin with empty folders."""
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in ("messages", "processed", "control"):
            (self._folder / name).mkdir(parents=True)

    def redeliver(self, job_id: str, patience: Patience) -> None:
        """Put the last message of the job that a worker has read back into the queue."""
        read = sorted((self._folder / "processed").glob(f"*.{QUEUE}.msg"))
        mine = [path for path in read if json.loads(path.read_text())["headers"]["id"] == job_id]
        mine[-1].rename(self._folder / "messages" / mine[-1].name)
