"""Free ports of the loopback interface."""

from __future__ import annotations

import random
import socket

# Below the range from which systems take the ports of outgoing connections (Linux: 32768 and up),
# so that no connection takes the port before its server does.
CANDIDATES = range(20_000, 32_000)


def free_port() -> int:
    """Return a port of 127.0.0.1 on which nothing listens.

    :raises OSError: a hundred ports, drawn at random, were all taken.
    """
    for port in random.sample(CANDIDATES, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError("no free port found on 127.0.0.1")
