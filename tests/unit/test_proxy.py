from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest

from tests.proxy import Proxy
from tests.wait import eventually


class Echo(socketserver.BaseRequestHandler):
    """Sends back what it gets, and remembers it."""

    got: ClassVar[list[bytes]] = []

    def handle(self):
        # A reset is what the tests are about.
        with contextlib.suppress(ConnectionError):
            while data := self.request.recv(1024):
                self.got.append(data)
                self.request.sendall(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        with Proxy(*server.server_address) as proxy:
            yield proxy
        server.shutdown()
        thread.join()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=10)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1024) == b""
    except ConnectionResetError:
        return True


def test_bytes_pass_in_both_directions(proxy):
    with connect(proxy) as client:
        client.sendall(b"hello")
        assert client.recv(1024) == b"hello"


def test_an_answer_is_broken_off_and_goes_on_later(proxy):
    with connect(proxy) as client:
        proxy.break_off_answer(after=3)
        client.sendall(b"hello")
        assert client.recv(1024) == b"hel"
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1024)
        client.settimeout(10)
        proxy.resume()
        assert client.recv(1024) == b"lo"


def test_much_data_passes_unharmed(proxy):
    sent = bytes(range(256)) * 8192
    with connect(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(sent,))
        sender.start()
        received = b""
        while len(received) < len(sent):
            received += client.recv(65536)
        sender.join()
    assert received == sent


def test_cut_ends_open_connections_and_refuses_new_ones(proxy):
    with connect(proxy) as client:
        client.sendall(b"hello")
        client.recv(1024)
        proxy.cut()
        assert is_closed(client)
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)


def test_stall_accepts_but_forwards_nothing_until_resumed(proxy):
    with connect(proxy) as before:
        before.sendall(b"hello")
        before.recv(1024)
        proxy.stall()
        with connect(proxy) as during:
            for client in (before, during):
                client.sendall(b"late")
                client.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    client.recv(1024)
                client.settimeout(10)
            proxy.resume()
            assert before.recv(1024) == b"late"
            assert during.recv(1024) == b"late"


def test_withheld_answers_come_when_it_resumes_and_the_server_has_got_the_question(proxy):
    with connect(proxy) as client:
        proxy.withhold_answers()
        client.sendall(b"question")
        eventually(lambda: Echo.got[-1] == b"question")
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1024)
        client.settimeout(10)
        proxy.resume()
        assert client.recv(1024) == b"question"


def test_resume_after_cut_forwards_new_connections_on_the_same_port(proxy):
    port = proxy.port
    proxy.cut()
    proxy.resume()
    assert proxy.port == port
    with connect(proxy) as client:
        client.sendall(b"hello")
        assert client.recv(1024) == b"hello"


def test_cut_ends_stalled_connections(proxy):
    proxy.stall()
    with connect(proxy) as client:
        client.sendall(b"hello")
        proxy.cut()
        assert is_closed(client)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("amqp://me:secret@broker/vhost", "amqp://me:secret@127.0.0.1:{}/vhost"),
        ("redis://cache:6379/3", "redis://127.0.0.1:{}/3"),
        ("postgresql+psycopg2://me@db/shop?a=b", "postgresql+psycopg2://me@127.0.0.1:{}/shop?a=b"),
    ],
)
def test_url_for_replaces_the_address_and_nothing_else(proxy, url, expected):
    assert proxy.url_for(url) == expected.format(proxy.port)
