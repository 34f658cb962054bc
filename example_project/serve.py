"""``python -m example_project.serve [SOCKET]``: the web server.

Arguments:
    SOCKET: the number of an open listening socket; without it, port 8000 on this machine.
"""

from __future__ import annotations

import sys

from werkzeug.serving import make_server

from example_project.web import web


def main() -> None:
    """Serve until the process is ended."""
    handle = int(sys.argv[1]) if len(sys.argv) > 1 else None
    make_server("127.0.0.1", 8000, web, threaded=True, fd=handle).serve_forever()


if __name__ == "__main__":
    main()
