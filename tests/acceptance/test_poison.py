"""Messages that no worker can run: each is kept, none stops the worker or its neighbours."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from celery_outbox.queues import consumes_quorum_queues
from celery_outbox.store import job as jobs
from celery_outbox.store.job import Job
from tests.acceptance.conftest import on_rabbitmq
from tests.acceptance.poison import (
    BARE,
    KINDS,
    PICKLE,
    Poison,
    first_protocol,
    send,
    send_unreadable,
)
from tests.acceptance.system import System
from tests.proxy import Proxy
from tests.servers.rabbitmq import RabbitmqApi
from tests.wait import eventually

POOLS = {
    "postgresql-rabbitmq": "prefork",
    "postgresql-redis": "threads",
    "sqlite-filesystem": "solo",
}

#: The headers of a call whose time was over long ago.
EXPIRED = {"expires": "2020-01-01T00:00:00+00:00"}


def row(system: System, job_id: str) -> Job:
    """Return the whole row of a job."""
    found = system.outbox.database.read(
        lambda connection: jobs.get(connection, system.outbox.tables, job_id)
    )
    assert found is not None, job_id
    return found


def quarantined(system: System) -> dict[str, Any]:
    """Return what is in quarantine in the database, by id."""
    return {entry.id: entry for entry in system.outbox.control.quarantined(limit=1000)}


def test_poison_of_every_kind_is_kept_and_the_next_job_runs(system: System) -> None:
    send(system.shop.app, "celery", *KINDS)
    unreadable = send_unreadable(system.shop.app, "celery")
    everything = len(KINDS) + unreadable
    system.shop.add.apply_async((1, 2), task_id="good")
    system.dispatcher()
    worker = system.worker("-c", "2", pool=POOLS[system.name])

    system.reaches("good", "succeeded", deadline=60.0)
    eventually(lambda: len(quarantined(system)) == everything, deadline=60.0)
    found = quarantined(system)
    for kind in KINDS:
        check(system, found, kind)
    stands_for_another = [
        entry for entry in found.values() if entry.error_code == "malformed:properties"
    ]
    assert len(stands_for_another) == unreadable
    eventually(lambda: system.depth("outbox.quarantine") == everything, deadline=60.0)
    assert worker.alive
    assert worker.log().count(" ready.") == 1
    assert "outbox.queue_without_dead_letters" not in worker.log()
    # Nothing is left with the worker either: what it holds would come back.
    worker.terminate()
    assert system.depth("celery") == 0
    assert system.depth("outbox.quarantine") == everything


def check(system: System, found: dict[str, Any], kind: Poison) -> None:
    """Look at what is kept of one message."""
    if kind.has_id:
        job = row(system, kind.name)
    else:
        [job] = [
            each
            for each in (row(system, job_id) for job_id in found if job_id.startswith("invalid-"))
            if each.body == (kind.kept or kind.body) and same_headers(each, kind)
        ]
    entry = found[job.id]
    assert (job.task, job.queue, job.state) == (kind.task, "celery", "quarantined"), kind.name
    assert (entry.reason, entry.source) == (kind.reason, "broker"), kind.name
    assert kind.error is None or entry.error_code == kind.error, kind.name
    assert (job.attempt, job.deliveries) == (0, 1), kind.name
    assert system.runs(job.id) == 0
    envelope = job.envelope
    assert job.body == (kind.kept or kind.body), kind.name
    assert (envelope.content_type, envelope.content_encoding) == (kind.content_type, kind.encoding)
    assert system.events(job.id)[0] == "quarantined"


def same_headers(job: Job, kind: Poison) -> bool:
    """Whether a job was made of the message of this kind."""
    headers = job.envelope.headers
    return {name: headers.get(name) for name in ("id", "task")} == {
        name: kind.all_headers.get(name) for name in ("id", "task")
    }


@on_rabbitmq
def test_a_queue_without_dead_letters_is_warned_of_and_its_poison_is_copied(
    system: System,
) -> None:
    system.shop.app.amqp.queues.add("plain")
    kinds = [kind for kind in KINDS if kind.name in ("not-json", "without-id", "exotic")]
    send(system.shop.app, "plain", *kinds)
    unreadable = send_unreadable(system.shop.app, "plain")
    send(
        system.shop.app,
        "plain",
        Poison("first-good", "", body=first_protocol(id="first-good"), headers=BARE),
        Poison("bare-good", "", headers={"task": "shop.bare"}),
        *(Poison(name, "", headers=EXPIRED) for name in ("late", "innocent")),
    )
    system.shop.add.apply_async((1, 2), task_id="innocent", countdown=3600)
    worker = system.worker("-Q", "plain,celery")
    system.dispatcher()

    assert system.reaches("first-good", "succeeded").attempt == 1
    eventually(lambda: system.runs("bare-good") == 1)
    assert system.reaches("late", "expired").attempt == 0
    eventually(lambda: "deferred" in system.events("innocent"))
    assert system.job("innocent").state == "queued"
    everything = len(kinds) + unreadable
    eventually(lambda: system.depth("outbox.quarantine") == everything)
    assert {entry.queue for entry in quarantined(system).values()} == {"plain"}
    for _ in range(everything):
        headers = system.take("outbox.quarantine").headers
        assert headers["x-outbox-job-id"] in quarantined(system)
        assert headers["x-outbox-reason"] in ("undecodable", "malformed")
    assert worker.log().count("outbox.queue_without_dead_letters queue=plain") == 1
    assert "outbox.queue_without_dead_letters queue=celery" not in worker.log()


@on_rabbitmq
def test_poison_stays_with_the_broker_while_the_database_is_away(
    system: System, proxy_to: Callable[[str], Proxy]
) -> None:
    url = system.environment["SHOP_DATABASE"]
    proxy = proxy_to(url)
    worker = system.worker("-c", "1", pool="prefork", SHOP_DATABASE=proxy.url_for(url))
    eventually(lambda: " ready." in worker.log())

    proxy.cut()
    send(system.shop.app, "celery", KINDS[0])
    eventually(lambda: worker.log().count("outbox.quarantine_failed") >= 3)
    assert quarantined(system) == {}
    assert system.depth("outbox.quarantine") == 0
    proxy.resume()

    system.reaches(KINDS[0].name, "quarantined")
    eventually(lambda: system.depth("outbox.quarantine") == 1)
    system.dispatcher()
    system.shop.add.apply_async((1, 2), task_id="good")
    system.reaches("good", "succeeded")
    assert worker.alive
    # Each failure doubles the pause.
    assert worker.log().count("outbox.quarantine_failed") < 50


@pytest.mark.parametrize("system", ["postgresql-redis"], indirect=True)
def test_what_was_not_accepted_is_replayed_when_it_is(system: System) -> None:
    body = pickle.dumps(([2, 3], {}, {}))
    with_arguments = {"body": body, "content_type": PICKLE, "encoding": "binary"}
    send(
        system.shop.app,
        "celery",
        Poison("sum", "undecodable", **with_arguments),
        Poison(
            "bare",
            "undecodable",
            headers={"task": "shop.bare"},
            **{**with_arguments, "body": pickle.dumps(([1], {}, {}))},
        ),
    )
    system.dispatcher()
    worker = system.worker()
    for job_id in ("sum", "bare"):
        assert system.reaches(job_id, "quarantined").reason == "undecodable"
    worker.terminate()

    settings = json.loads(system.environment["SHOP_SETTINGS"])
    settings["accept_content"] = ["json", "pickle"]
    system.worker(SHOP_SETTINGS=json.dumps(settings), C_FORCE_ROOT="1")
    for job_id in ("sum", "bare"):
        system.outbox.control.replay(job_id)

    system.reaches("sum", "succeeded")
    assert row(system, "sum").result == b"5"
    # Without the outbox the job ends when its message is with the broker.
    system.reaches("bare", "relayed")
    eventually(lambda: system.runs("bare") == 1)


@pytest.mark.parametrize("queue", ["celery", "lone"])
@on_rabbitmq
def test_jobs_that_were_only_prefetched_by_dying_workers_complete(
    system: System, rabbitmq_api: RabbitmqApi, queue: str
) -> None:
    """The first queue has our dead letters, the second has none: what is past the limit is gone."""
    rabbitmq_api.set_policy(f"^{queue}$", {"delivery-limit": 1})
    quorum = "quorum" if consumes_quorum_queues() else "classic"
    jobs_ids = [f"job-{number}" for number in range(8)]
    for job_id in jobs_ids:
        system.shop.add.apply_async((1, 2), task_id=job_id, queue=queue)
    shop = json.loads(system.environment["SHOP_SETTINGS"]) | {"outbox_republish_after": 1.0}
    environment = {"SHOP_SETTINGS": json.dumps(shop)}
    if queue == "lone" and consumes_quorum_queues():
        environment["SHOP_QUORUM_QUEUE"] = queue
    system.dispatcher(**environment)
    eventually(lambda: system.depth(queue) == 8)

    options = ("-Q", queue)
    for _ in range(2):
        dying = system.worker(*options, "-c", "1", fault="execute.after_claim", **environment)
        assert dying.wait() == -9
    worker = system.worker(*options, "-c", "4", pool="threads", **environment)

    for job_id in jobs_ids:
        system.reaches(job_id, "succeeded", deadline=60.0)
        assert system.runs(job_id) == 1
    assert quarantined(system) == {}
    assert rabbitmq_api.kind(queue) == quorum
    warning = f"outbox.queue_without_dead_letters queue={queue}"
    assert worker.log().count(warning) == (queue == "lone")
    if consumes_quorum_queues() and queue == "celery":
        # Past its delivery limit the broker drops a message: without our dead letters for good.
        message = system.take("outbox.quarantine")
        assert message.headers["x-first-death-reason"] == "delivery_limit"
    else:
        assert system.depth("outbox.quarantine") == 0
