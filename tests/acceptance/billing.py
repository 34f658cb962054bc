"""Another service: a plain Celery app whose process does not even have celery_outbox.

Run as a program, it is its own worker: ``python -m tests.acceptance.billing worker ...``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Celery's command line would load the commands of every package that is installed.
sys.modules["celery_outbox"] = None  # type: ignore[assignment]

from celery import Celery  # noqa: E402 - after that

FOLDER = Path(os.environ["SHOP_FOLDER"])

app = Celery("billing", broker=os.environ["SHOP_BROKER"])
app.conf.task_default_queue = "billing"
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_enable_remote_control = False


@app.task(name="billing.invoice", bind=True)
def invoice(self: Any, amount: int, *, currency: str = "EUR") -> int:
    """Note what came, and how it was announced."""
    line = f"{self.request.id} {amount} {currency} {self.request.argsrepr}\n"
    with (FOLDER / "invoices").open("a") as invoices:
        invoices.write(line)
    return amount


if __name__ == "__main__":
    app.worker_main(sys.argv[1:])
