"""py-amqp alone: as many confirmed messages as Python can publish over one connection."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg2
from amqp import Connection, Message

from benchmarks.peers.timing import seconds_of
from benchmarks.stage import Place

#: Messages sent before the oldest must be confirmed; as the dispatcher's default.
WINDOW = 500
QUEUE = "celery"


@dataclass(frozen=True)
class Template:
    """A message as a dispatcher has sent it, read back from the queue.

    Attributes:
        job_id: what is another text in each message.
    """

    body: bytes
    headers: dict[str, Any]
    properties: dict[str, Any]
    job_id: str


class Publisher:
    """Publishes messages like one that celery-outbox made, with pipelined confirms."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._template: Template | None = None
        self._unconfirmed: set[int] = set()
        self._ids: list[str] = []
        self._connect().close()

    def take(self, job_id: str) -> Template:
        """Take a message off the queue of this place, for others to be like it."""
        with self._connect() as connection:
            message = connection.channel().basic_get(QUEUE, no_ack=True)
            properties = dict(message.properties)
            headers = properties.pop("application_headers")
            body = message.body
            return Template(
                body if isinstance(body, bytes) else body.encode(), headers, properties, job_id
            )

    def like(self, template: Template) -> None:
        """Publish messages like this one from now on."""
        self._template = template

    def fill(self, count: int) -> None:
        """Choose the ids; with :meth:`drain`."""
        self._ids = [str(uuid.uuid4()) for _ in range(count)]

    def drain(self) -> float:
        """Publish all; returns the seconds until the last confirm, connecting included."""

        def work() -> None:
            with self._connect() as connection:
                self._publish(connection, self._channel(connection), self._ids)

        return seconds_of(work)

    def fill_table(self, count: int) -> None:
        """Make so many rows; with :meth:`drain_table`."""
        assert self._template is not None
        with psycopg2.connect(self._place.libpq) as connection, connection.cursor() as cursor:
            cursor.execute(
                "CREATE TABLE IF NOT EXISTS raw_outbox (id bigserial PRIMARY KEY, "
                "job_id text NOT NULL, envelope text NOT NULL)"
            )
            cursor.execute("TRUNCATE raw_outbox")
            cursor.execute(
                "INSERT INTO raw_outbox (job_id, envelope) "
                "SELECT gen_random_uuid()::text, %s FROM generate_series(1, %s)",
                (repr(self._template), count),
            )
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE raw_outbox")
            cursor.execute("CHECKPOINT")
        connection.close()

    def drain_table(self) -> float:
        """Publish all rows: select with skip locked, publish, wait for the confirms, delete,
        commit; returns the seconds."""

        def work() -> None:
            database = psycopg2.connect(self._place.libpq)
            with self._connect() as connection, database.cursor() as cursor:
                channel = self._channel(connection)
                while True:
                    cursor.execute(
                        "SELECT id, job_id, envelope FROM raw_outbox ORDER BY id LIMIT %s "
                        "FOR UPDATE SKIP LOCKED",
                        (WINDOW,),
                    )
                    rows = cursor.fetchall()
                    if not rows:
                        break
                    self._publish(connection, channel, [row[1] for row in rows])
                    cursor.execute(
                        "DELETE FROM raw_outbox WHERE id = ANY(%s)", ([row[0] for row in rows],)
                    )
                    database.commit()
            database.close()

        return seconds_of(work)

    def purge(self) -> None:
        """Empty the queue."""
        with self._connect() as connection:
            connection.channel().queue_purge(QUEUE)

    def depth(self) -> int:
        """Messages in the queue."""
        with self._connect() as connection:
            declared = connection.channel().queue_declare(QUEUE, passive=True)
            return int(declared.message_count)

    def _connect(self) -> Connection:
        parts = urlsplit(self._place.broker)
        connection = Connection(
            host=f"{parts.hostname}:{parts.port}",
            userid=unquote(parts.username or "guest"),
            password=unquote(parts.password or "guest"),
            virtual_host=unquote(parts.path[1:]) or "/",
        )
        connection.connect()
        return connection

    def _channel(self, connection: Connection) -> Any:
        channel = connection.channel()
        channel.queue_declare(QUEUE, durable=True, auto_delete=False)
        channel.confirm_select()
        self._unconfirmed.clear()
        self._next = 1
        channel.events["basic_ack"].add(self._on_ack)
        return channel

    def _publish(self, connection: Connection, channel: Any, ids: Sequence[str]) -> None:
        template = self._template
        assert template is not None
        made = _maker(template)
        for job_id in ids:
            while len(self._unconfirmed) >= WINDOW:
                connection.drain_events(timeout=60)
            channel.basic_publish(made(job_id), exchange="", routing_key=QUEUE, mandatory=True)
            self._unconfirmed.add(self._next)
            self._next += 1
        while self._unconfirmed:
            connection.drain_events(timeout=60)

    def _on_ack(self, tag: int, multiple: bool) -> None:
        if multiple:
            self._unconfirmed -= {each for each in self._unconfirmed if each <= tag}
        else:
            self._unconfirmed.discard(tag)


def _maker(template: Template) -> Callable[[str], Message]:
    """Makes a message like the template, with another id wherever that has its own."""
    own = [name for name, value in template.headers.items() if value == template.job_id]
    named = [name for name, value in template.properties.items() if value == template.job_id]

    def made(job_id: str) -> Message:
        headers = {**template.headers, **_same(own, job_id)}
        properties = {**template.properties, **_same(named, job_id)}
        return Message(template.body, application_headers=headers, **properties)

    return made


def _same(names: Iterable[str], value: str) -> dict[str, str]:
    return dict.fromkeys(names, value)
