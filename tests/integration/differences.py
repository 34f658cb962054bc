"""What the outbox changes about a message on purpose: the one list.

``docs/reference/messages.rst`` explains each line of it. Any other difference between a message
of stock Celery and the one that a dispatcher publishes for the same call is a fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.integration.spy_transport import Published

#: Headers that are not sent: the database has the say in them, or they are about the body.
NOT_SENT = ("expires", "compression")

#: Headers with another value.
CHANGED: dict[str, Any] = {
    # The delay belongs to the database.
    "eta": None,
    # The number of attempts that the job has had.
    "retries": 0,
    # The worker reads the rest from the job's row.
    "outbox_version": 1,
}

#: Headers that show arguments, unless the call says how.
REDACTED = ("argsrepr", "kwargsrepr")

#: The time to live is the database's, as with ``expires``.
PROPERTIES_NOT_SENT = ("expiration",)

#: A claim check has no arguments.
BODY = b"[[], {}, {}]"

#: What a body sees otherwise in ``self.request``.
REQUEST_DIFFERS = {"eta", "retries", "argsrepr", "kwargsrepr"}

#: Signatures in ``self.request`` that have an id of their own already, so that a callback which is
#: sent twice is one job.
WITH_IDS = ("callbacks", "errbacks")


def as_claim_check(stock: Published, options: dict[str, Any]) -> Published:
    """The message that a dispatcher has to publish for a call, given that of stock Celery.

    Arguments:
        options: of the call.
    """
    headers = {name: value for name, value in stock.headers.items() if name not in NOT_SENT}
    headers |= CHANGED
    headers |= {name: options.get(name, "(...)") for name in REDACTED}
    return replace(
        stock,
        headers=headers,
        properties={
            name: value
            for name, value in stock.properties.items()
            if name not in PROPERTIES_NOT_SENT
        },
        content_type="application/json",
        content_encoding="utf-8",
        body=BODY,
    )


def as_seen(request: dict[str, Any]) -> dict[str, Any]:
    """What both have to show a body in ``self.request``."""
    seen = {
        name: value
        for name, value in request.items()
        if name not in REQUEST_DIFFERS and not name.startswith("_")
    }
    for name in WITH_IDS:
        seen[name] = [_without_id(each) for each in request[name] or ()]
    seen["properties"] = {
        name: value
        for name, value in request["properties"].items()
        if name not in (*PROPERTIES_NOT_SENT, "delivery_tag", "delivery_info", "body_encoding")
    }
    return seen


def _without_id(signature: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in signature["options"].items() if name != "task_id"}
    return {**signature, "options": options}
