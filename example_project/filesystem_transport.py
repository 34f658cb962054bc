"""kombu's filesystem transport, whose files appear whole.

kombu opens a message's file, locks it and then writes it, and a worker that looks in between
reads an empty message and ends with a ``JSONDecodeError``; likewise for the files of bindings
(kombu.transport.filesystem, ``_put`` and ``_queue_bind``). Here a file gets its name when
everything is in it.
"""

from __future__ import annotations

import fcntl
import time
import uuid
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):  # type: ignore[misc]
    """Writes beside, then renames."""

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:
        # A worker reads in the order of the names.
        name = f"{round(time.monotonic() * 1000)}_{uuid.uuid4()}.{queue}.msg"
        _write_whole(Path(self.data_folder_out) / name, payload)

    def _queue_bind(
        self, exchange: str, routing_key: str | None, pattern: str | None, queue: str | None
    ) -> None:
        binding = filesystem.exchange_queue_t(routing_key or "", pattern or "", queue or "")
        self.control_folder.mkdir(exist_ok=True)
        with (self.control_folder / "bindings.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            bindings = self.get_table(exchange)
            if binding not in bindings:
                file = self.control_folder / f"{exchange}.exchange"
                _write_whole(file, [binding, *bindings])


class Transport(filesystem.Transport):  # type: ignore[misc]
    """For the setting ``broker_transport``."""

    Channel = Channel


def _write_whole(file: Path, content: Any) -> None:
    part = file.with_name(f"{uuid.uuid4()}.part")
    part.write_text(dumps(content))
    part.rename(file)
