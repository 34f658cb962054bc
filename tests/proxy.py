"""A TCP proxy that can cut or stall the way to a server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any
from urllib.parse import urlsplit

from tests.servers.ports import free_port

BUFFER = 65536

# Discard what is unsent and reset the connection on close, as a failing server does.
RESET_ON_CLOSE = struct.pack("ii", 1, 0)

DEFAULT_PORTS = {"amqp": 5672, "redis": 6379, "postgresql": 5432, "http": 80}


class Proxy:
    """Forwards connections from a free loopback port to a server, until told otherwise.

    Use it as a context manager. Every command has taken effect when it returns.

    :param host: the server's host.
    :param port: the server's port.
    """

    # asyncio's own servers and streams are not used: a server that is closed while it accepts
    # leaves that connection open, for ever.

    def __init__(self, host: str, port: int) -> None:
        self.port = free_port()
        self._target = (socket.gethostbyname(host), port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._listener: socket.socket | None = None
        self._connections: dict[asyncio.Task[None], socket.socket] = {}
        self._flowing = asyncio.Event()
        self._answering = asyncio.Event()
        self._left: int | None = None
        self._thread.start()
        self._run(self._listen())

    @classmethod
    def to(cls, url: str) -> Proxy:
        """Return a proxy to the server of this URL; see :meth:`url_for`."""
        parts = urlsplit(url)
        assert parts.hostname, f"{url} names no host"
        return cls(parts.hostname, parts.port or DEFAULT_PORTS[parts.scheme.split("+")[0]])

    def url_for(self, url: str) -> str:
        """Return this URL with the proxy's address in place of the server's."""
        parts = urlsplit(url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self.port}").geturl()

    def cut(self) -> None:
        """Reset all connections and refuse new ones."""
        self._run(self._cut())

    def stall(self) -> None:
        """Accept connections, but forward nothing in either direction."""
        self._run(self._stall())

    def withhold_answers(self) -> None:
        """Forward what clients send, and nothing that servers answer."""
        self._run(self._withhold())

    def break_off_answer(self, after: int) -> None:
        """Forward so many bytes of what a server answers next, and nothing after them."""
        self._run(self._break_off(after))

    def resume(self) -> None:
        """Forward again, what arrived during a stall included."""
        self._run(self._listen())

    def close(self) -> None:
        """Cut, and end the thread."""
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = socket.socket()
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(("127.0.0.1", self.port))
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._loop.add_reader(self._listener, self._accept, self._listener)
        self._flowing.set()
        self._answering.set()

    async def _stall(self) -> None:
        await self._listen()
        self._flowing.clear()
        self._answering.clear()

    async def _withhold(self) -> None:
        await self._listen()
        self._answering.clear()

    async def _break_off(self, after: int) -> None:
        self._left = after

    async def _cut(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        connections = dict(self._connections)
        for connection, client in connections.items():
            with contextlib.suppress(OSError):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return  # It was gone before it could be accepted.
        connection = self._loop.create_task(self._connect(client))
        self._connections[connection] = client
        connection.add_done_callback(self._forget)

    def _forget(self, connection: asyncio.Task[None]) -> None:
        self._connections.pop(connection).close()

    async def _connect(self, client: socket.socket) -> None:
        client.setblocking(False)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.setblocking(False)
            await self._loop.sock_connect(server, self._target)
            pumps = [
                self._loop.create_task(self._pump(client, server, self._flowing)),
                self._loop.create_task(self._pump(server, client, self._answering)),
            ]
            try:
                # One side closing ends the connection: no protocol used here half-closes.
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, source: socket.socket, target: socket.socket, flowing: asyncio.Event
    ) -> None:
        while True:
            await flowing.wait()
            data = await self._loop.sock_recv(source, BUFFER)
            if not data:
                return
            await flowing.wait()
            if self._left is not None and flowing is self._answering:
                self._answering.clear()
                begun, data = data[: self._left], data[self._left :]
                self._left = None
                await self._loop.sock_sendall(target, begun)
                await flowing.wait()
            await self._loop.sock_sendall(target, data)
