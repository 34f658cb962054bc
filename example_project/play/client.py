"""A client of the web server, over real HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

TIMEOUT = 20


class Client:
    """Talks to the server at ``base``, such as ``http://127.0.0.1:8000``."""

    def __init__(self, base: str) -> None:
        self._base = base

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """The status and the JSON that come back."""
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return self._ask(urllib.request.Request(self._base + path, data, headers))

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """The status and the JSON that come back."""
        return self._ask(urllib.request.Request(self._base + path))

    def _ask(self, request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
        # No proxy: the server is on this machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=TIMEOUT) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, json.load(refusal)
