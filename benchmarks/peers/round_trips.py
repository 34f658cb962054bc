"""Counts how often a client of PostgreSQL waits for its server."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit

from sqlalchemy import make_url


class RoundTrips:
    """Stands between a client and its server, and counts the server's "ready for query": one ends
    each round trip (PostgreSQL documentation, section 55.2).

    Attributes:
        url: of the database, through here.
        count: so far.
    """

    def __init__(self, url: str, host: str, port: int) -> None:
        self.count = 0
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Without encryption, which would also begin with an answer of another form.
        self.url = (
            make_url(url)
            .set(host="127.0.0.1", port=self._listener.getsockname()[1])
            .update_query_dict({"sslmode": "disable", "gssencmode": "disable"})
            .render_as_string(hide_password=False)
        )
        threading.Thread(target=self._accept, daemon=True).start()

    @classmethod
    def to(cls, url: str) -> RoundTrips:
        """One in front of the server of a SQLAlchemy URL."""
        parts = urlsplit(url)
        return cls(url, parts.hostname or "127.0.0.1", parts.port or 5432)

    def close(self) -> None:
        """Take no more connections; those that are open end with their clients."""
        self._listener.close()

    def __enter__(self) -> RoundTrips:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=_forward, args=(client, server), daemon=True).start()
                threading.Thread(
                    target=self._forward_and_count, args=(server, client), daemon=True
                ).start()

    def _forward_and_count(self, server: socket.socket, client: socket.socket) -> None:
        left, head = 0, b""
        with contextlib.suppress(OSError), server, client:
            while data := server.recv(65536):
                # Counted before it is sent on: the client asks for the count when it has it.
                view = memoryview(data)
                while view:
                    if left:
                        step = min(left, len(view))
                        left, view = left - step, view[step:]
                        continue
                    # A letter, and the length of the rest with its own four bytes.
                    need = 5 - len(head)
                    head, view = head + bytes(view[:need]), view[need:]
                    if len(head) == 5:
                        self.count += head[:1] == b"Z"
                        left, head = int.from_bytes(head[1:], "big") - 4, b""
                client.sendall(data)


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
