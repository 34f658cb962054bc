"""The Celery app and its outbox.

The times are short so that the demonstration is; a service would keep the defaults.
"""

from __future__ import annotations

from typing import Any

from celery import Celery

from celery_outbox import Outbox
from example_project.settings import Settings

QUEUE = "example_exports"
FILESYSTEM_TRANSPORT = "example_project.filesystem_transport:Transport"
QUARANTINE_QUEUE = "example_exports.quarantine"
TABLE_PREFIX = "example_outbox_"
#: Redis: every key of the shop starts with it.
KEY_PREFIX = "example_shop:"
#: Redis: seconds after which a message that nobody acknowledged comes back.
VISIBILITY_TIMEOUT = 3


def make_celery(settings: Settings) -> tuple[Celery, Outbox]:
    """The shop's Celery app, which knows its outbox by configuration alone."""
    app = Celery(
        "example_project",
        broker=settings.broker_url,
        task_cls="celery_outbox:OutboxTask",
        include=["example_project.tasks"],
        set_as_current=False,
    )
    app.conf.update(
        outbox_database_url=settings.database_url,
        outbox_table_prefix=TABLE_PREFIX,
        outbox_result_store=settings.folder.as_uri(),
        outbox_quarantine_queue=QUARANTINE_QUEUE,
        outbox_require_transaction=True,
        outbox_lease=2.0,
        outbox_heartbeat_interval=0.5,
        outbox_publish_timeout=1.0,
        outbox_dispatch_lease=2.0,
        outbox_poll_interval=0.1,
        outbox_maintenance_interval=0.5,
        outbox_retry_delay=0.1,
        outbox_max_attempts=3,
        broker_transport=FILESYSTEM_TRANSPORT if settings.needs_no_broker else None,
        broker_transport_options=transport_options(settings),
        broker_connection_timeout=5,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        task_default_queue=QUEUE,
    )
    outbox = Outbox(app)
    app.conf.task_queues = [outbox.queue(QUEUE)]
    app.conf.task_routes = {"example_project.*": {"queue": QUEUE}}
    return app, outbox


def transport_options(settings: Settings) -> dict[str, Any]:
    """What kombu needs to know of the broker beside its URL."""
    if settings.needs_no_broker:
        folder = settings.broker_folder
        return {
            # One process's outbox is the other's inbox.
            "data_folder_in": str(folder / "messages"),
            "data_folder_out": str(folder / "messages"),
            "control_folder": str(folder / "control"),
            "processed_folder": str(folder / "processed"),
            "store_processed": True,
            "polling_interval": 0.1,
        }
    if settings.broker_url.startswith("redis"):
        return {
            "global_keyprefix": KEY_PREFIX,
            "visibility_timeout": VISIBILITY_TIMEOUT,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        }
    return {}
