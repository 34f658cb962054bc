"""What "Next steps" types into a Python shell; writes what comes back."""

from __future__ import annotations

import json
import sys

from celery import chain, group

from celery_outbox import Outbox
from tests.acceptance.shapes.proj.celery import app
from tests.acceptance.shapes.proj.tasks import add, mul
from tests.wait import eventually

PATIENCE = 60.0


def main() -> None:
    """Make the calls and wait for each."""
    first = add.delay(2, 2)
    # The answer is there before anybody asks for it.
    eventually(lambda: Outbox.of(app).job(first.id).state == "succeeded", deadline=PATIENCE)
    failing = add.delay(2, "3")
    error = failing.get(timeout=PATIENCE, propagate=False)
    sys.stdout.write(
        json.dumps(
            {
                "call": first.get(timeout=PATIENCE),
                "state": first.state,
                "chain": chain(add.s(4, 4) | mul.s(8))().get(timeout=PATIENCE),
                "group": group(add.s(i, i) for i in range(10))().get(timeout=PATIENCE),
                "countdown": add.apply_async((2, 2), countdown=1).get(timeout=PATIENCE),
                "partial": add.s(2).delay(8).get(timeout=PATIENCE),
                "error": type(error).__name__,
                "failed": failing.failed(),
            }
        )
    )


if __name__ == "__main__":
    main()
