"""The example: its demonstration on three combinations, its HTTP side, and its verdicts."""

from __future__ import annotations

import csv
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url

from example_project.play import (
    after_settle,
    before_mark,
    before_publish,
    before_settle,
    third_attempt,
    third_error,
    undisturbed,
)
from example_project.play.look import Seen
from example_project.play.stage import job_of
from tests.processes import REPOSITORY, Processes, ProcessGroup
from tests.wait import eventually

PARTS = ("0", "1", "2", "3a", "3b", "4a", "4b")
SUCCEEDED = [job_of(account) for account in (42, 7, 8, 9, 10, 13)]
QUARANTINED = {job_of(11): "lost_worker", job_of(12): "attempts_exhausted"}
#: Seconds. Other tests run at the same time, and it is the states that count.
LIMIT = 200


def demonstrate(
    processes: Processes, *arguments: str, env: dict[str, str] | None = None
) -> ProcessGroup:
    environment = {"EXAMPLE_LIMIT": str(LIMIT - 5), **(env or {})}
    return processes.python("-m", "example_project", *arguments, name="example", env=environment)


def assert_all_is_well(process: ProcessGroup) -> None:
    """Each part has its verdict, and all are right."""
    assert process.wait(LIMIT + 5) == 0, process.log()
    verdicts = process.log().partition("\nVerdicts\n")[2]
    found = [line.split()[:2] for line in verdicts.splitlines() if line[:5] in ("OK   ", "WRONG")]
    assert [(word, part.rstrip(".")) for word, part in found] == [("OK", part) for part in PARTS]


def assert_state_and_files(engine: Engine, folder: Path) -> None:
    """Looked at here, not by the demonstration: the tables and the folder."""
    with engine.connect() as connection:
        jobs = {
            row.id: row
            for row in connection.execute(
                text("SELECT id, state, reason, deliveries FROM example_outbox_job")
            )
        }
        claims = dict(
            connection.execute(
                text(
                    "SELECT job_id, count(*) FROM example_outbox_event"
                    " WHERE event = 'claimed' GROUP BY job_id"
                )
            ).all()
        )
        runs = dict(
            connection.execute(
                text("SELECT job_id, count(*) FROM example_run GROUP BY job_id")
            ).all()
        )
        requests = set(connection.scalars(text("SELECT job_id FROM example_export_request")))
        pending = connection.scalar(
            text("SELECT count(*) FROM example_outbox_message WHERE published_at IS NULL")
        )
    assert {name: jobs[name].state for name in SUCCEEDED} == dict.fromkeys(SUCCEEDED, "succeeded")
    assert {name: jobs[name].reason for name in QUARANTINED} == QUARANTINED
    assert set(jobs) == requests == {*SUCCEEDED, *QUARANTINED}
    assert runs == {**dict.fromkeys(SUCCEEDED, 1), job_of(11): 3, job_of(12): 3}
    assert claims == {**dict.fromkeys(SUCCEEDED, 1), job_of(10): 2, job_of(11): 3, job_of(12): 3}
    # At least: the worker that ran it is killed later in the play, and a broker delivers again
    # whatever acknowledgement it has not read by then. What counts is one claim and one run.
    assert jobs[job_of(8)].deliveries >= 2
    assert jobs[job_of(9)].deliveries >= 2
    assert pending == 0
    files = sorted(path.name for path in (folder / "reports").iterdir() if path.is_file())
    assert files == sorted(f"{name}.csv" for name in SUCCEEDED)
    for name in SUCCEEDED:
        assert (folder / "reports" / f"{name}.csv").read_text() == expected_report(name)


def expected_report(job_id: str) -> str:
    """Made from the CSV that the example ships, without the example's code."""
    account = job_id.split("-")[1]
    lines = ["order,date,product,quantity,unit_price,total"]
    with (REPOSITORY / "example_project/data/orders.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["account_id"] == account and row["date"].startswith("2026-01-"):
                total = int(row["quantity"]) * round(float(row["unit_price"]) * 100)
                product = row["product"]
                quoted = f'"{product}"' if "," in product else product
                lines.append(
                    f"{row['id']},{row['date']},{quoted},{row['quantity']},"
                    f"{row['unit_price']},{total // 100}.{total % 100:02}"
                )
    return "\n".join(lines) + "\n"


# -- the demonstration -----------------------------------------------------------------


@pytest.mark.slow
def test_it_runs_without_any_server(processes: Processes, tmp_path: Path):
    folder = tmp_path / "kept"
    process = demonstrate(processes, "--keep", str(folder))
    assert_all_is_well(process)
    engine = create_engine(f"sqlite:///{folder / 'shop.sqlite'}")
    assert_state_and_files(engine, folder)
    engine.dispose()
    messages = sorted(
        path.name.partition(".")[2] for path in (folder / "broker/messages").iterdir()
    )
    assert messages == ["example_exports.quarantine.msg"] * 2
    assert no_process_mentions(folder)


@pytest.mark.slow
@pytest.mark.once
def test_it_runs_on_postgresql_and_rabbitmq_again_and_again(
    processes: Processes, tmp_path: Path, postgresql_url: str, rabbitmq_url: str, rabbitmq_api
):
    engine = create_engine(make_url(postgresql_url))
    for number in (1, 2):
        folder = tmp_path / f"kept-{number}"
        process = demonstrate(
            processes, "--keep", str(folder), "--database", postgresql_url, "--broker", rabbitmq_url
        )
        assert_all_is_well(process)
        assert_state_and_files(engine, folder)
        eventually(lambda: rabbitmq_api.depth("example_exports") == 0)
        assert rabbitmq_api.depth("example_exports.quarantine") >= 2
    engine.dispose()


@pytest.mark.slow
@pytest.mark.once
def test_it_runs_on_postgresql_and_redis_again_and_again(
    processes: Processes, tmp_path: Path, postgresql_url: str, redis_url: str
):
    from redis import Redis

    engine = create_engine(make_url(postgresql_url))
    for number in (1, 2):
        folder = tmp_path / f"kept-{number}"
        process = demonstrate(
            processes, "--keep", str(folder), "--database", postgresql_url, "--broker", redis_url
        )
        assert_all_is_well(process)
        assert_state_and_files(engine, folder)
        with Redis.from_url(redis_url) as client:
            assert client.llen("example_shop:example_exports") == 0
            assert client.llen("example_shop:example_exports.quarantine") == 2
            assert client.hlen("example_shop:unacked") == 0
    engine.dispose()


@pytest.mark.slow
def test_a_broken_guard_is_found_out(processes: Processes, tmp_path: Path):
    # Python imports this module in every process before anything else.
    (tmp_path / "sitecustomize.py").write_text(
        "from celery_outbox.execute.attempt import Attempt\n"
        "Attempt._result_exists = lambda self, default=False: default\n"
    )
    process = demonstrate(processes, env={"PYTHONPATH": str(tmp_path)})
    assert process.wait(LIMIT + 5) == 1, process.log()
    wrong = [line for line in process.log().splitlines() if line.startswith("WRONG")]
    assert any("3b." in line and "the body ran once" in line for line in wrong), process.log()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demonstration_leaves_nothing(
    number: int, processes: Processes, tmp_path: Path
):
    process = demonstrate(processes, env={"TMPDIR": str(tmp_path)})
    eventually(lambda: "-> 202" in process.log(), message=process.log)
    folder = next(tmp_path.glob("celery-outbox-example-*"))
    assert not no_process_mentions(folder)
    process.send(number)
    assert process.wait() == 130
    assert "Traceback" not in process.log()
    assert not folder.exists()
    assert no_process_mentions(folder)


def no_process_mentions(folder: Path) -> bool:
    """Whether no process has the folder in its environment, as all the example's have."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"EXAMPLE_FOLDER={folder}\0".encode() in path.read_bytes():
                found.append(path)
        except OSError:
            continue
    return not found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--database", "nonsense"], "outbox_database_url is not usable"),
        (["--database", "oracle://host/name"], "oracle is not one of"),
        (["--database", "postgresql+psycopg2://x@127.0.0.1:1/x"], "The database cannot be used"),
        (["--broker", "nonsense"], "must start with amqp:// or redis://"),
        (["--broker", "amqp://127.0.0.1:1//"], "The broker cannot be used"),
        (["--broker", "redis://127.0.0.1:1/0"], "The broker cannot be used"),
        (["--broker", "redis://127.0.0.1:nonsense/0"], "port is not a number"),
        (["--keep", "/"], "the folder is not empty"),
        (["--keep", "/dev/null/folder"], "Not a directory"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(arguments: list[str], said: str):
    done = subprocess.run(
        [sys.executable, "-m", "example_project", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2, done
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# -- HTTP ------------------------------------------------------------------------------


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The example's modules, made anew for a database of their own."""
    for name in [name for name in sys.modules if name.startswith("example_project")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("EXAMPLE_FOLDER", str(tmp_path))
    from example_project import web
    from example_project.load import load
    from example_project.models import Base
    from example_project.tasks import Sessions

    engine = Sessions.kw["bind"]
    Base.metadata.create_all(engine)
    web.outbox.init()
    with Sessions.begin() as session:
        load(session)
    yield web
    engine.dispose()
    web.outbox.engine.dispose()


@pytest.fixture
def client(shop) -> FlaskClient:
    return shop.web.test_client()


def rows(tmp_path: Path) -> dict[str, int]:
    """How many rows each table has in which a request leaves something."""
    tables = ("example_export_request", "example_outbox_job", "example_outbox_message")
    with sqlite3.connect(tmp_path / "shop.sqlite") as connection:
        found = {
            table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in tables
        }
    connection.close()
    return found


def test_a_request_is_recorded_with_its_job(client: FlaskClient, tmp_path: Path):
    answer = client.post("/exports", json={"account_id": 42, "period": "2026-01"})
    assert answer.status_code == 202
    assert answer.json == {
        "job_id": "export-42-2026-01",
        "new": True,
        "status_url": "/jobs/export-42-2026-01",
    }
    assert set(rows(tmp_path).values()) == {1}
    job = client.get(answer.json["status_url"])
    assert job.status_code == 200
    assert (job.json["state"], job.json["attempt"]) == ("queued", 0)
    assert job.json["published_at"] is None


def test_a_second_request_finds_the_first_job(client: FlaskClient, tmp_path: Path):
    body = {"account_id": 42, "period": "2026-01"}
    first, second = client.post("/exports", json=body), client.post("/exports", json=body)
    assert second.status_code == 202
    assert second.json == {**first.json, "new": False}
    assert set(rows(tmp_path).values()) == {1}


def test_a_request_that_lost_a_race_finds_the_first_job(
    shop, client: FlaskClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    body = {"account_id": 42, "period": "2026-01"}
    client.post("/exports", json=body)
    # It looked before the other request was committed.
    real = shop.Session.get

    def blind(self, entity, *args, **kwargs):
        return None if entity is shop.ExportRequest else real(self, entity, *args, **kwargs)

    monkeypatch.setattr(shop.Session, "get", blind)
    answer = client.post("/exports", json=body)
    assert (answer.status_code, answer.json["new"]) == (202, False)
    assert set(rows(tmp_path).values()) == {1}


def test_a_request_whose_recording_fails_leaves_nothing(
    shop, client: FlaskClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(shop.export, "apply_async", fail)
    answer = client.post("/exports", json={"account_id": 42, "period": "2026-01"})
    assert answer.status_code == 500
    assert set(rows(tmp_path).values()) == {0}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "send JSON"),
        (b"account_id=42", 400, "send JSON"),
        (b'{"account_id": 42,', 400, "send JSON"),
        (b"[42]", 400, "send JSON"),
        (b"null", 400, "send JSON"),
        (b"\xff\xfe", 400, "send JSON"),
        (b"{}", 400, "account_id"),
        (b'{"period": "2026-01"}', 400, "account_id"),
        (b'{"account_id": "42", "period": "2026-01"}', 400, "account_id"),
        (b'{"account_id": true, "period": "2026-01"}', 400, "account_id"),
        (b'{"account_id": 4.2, "period": "2026-01"}', 400, "account_id"),
        (b'{"account_id": 42}', 400, "period"),
        (b'{"account_id": 42, "period": 202601}', 400, "period"),
        (b'{"account_id": 42, "period": "2026-13"}', 400, "not '2026-13'"),
        (b'{"account_id": 42, "period": "0000-01"}', 400, "not '0000-01'"),
        (b'{"account_id": 42, "period": "9999-12"}', 400, "not '9999-12'"),
        (b'{"account_id": 42, "period": "2026-01-01"}', 400, "a period is a month"),
        (b'{"account_id": 42, "period": "2026-01\\n"}', 400, "a period is a month"),
        (b'{"account_id": 42, "period": "../../etc"}', 400, "a period is a month"),
        (b'{"account_id": 61, "period": "2026-01"}', 404, "no account 61"),
        (b'{"account_id": -1, "period": "2026-01"}', 404, "no account -1"),
        (b'{"account_id": 99999999999999999999, "period": "2026-01"}', 404, "no account"),
    ],
)
def test_bad_input_is_refused_and_leaves_nothing(
    body: bytes, status: int, said: str, client: FlaskClient, tmp_path: Path
):
    answer = client.post("/exports", data=body, content_type="application/json")
    assert answer.status_code == status
    assert said in answer.json["error"]
    assert set(rows(tmp_path).values()) == {0}


@pytest.mark.parametrize("job_id", ["export-1-2026-01", "nonsense", "x" * 300, "a%00b"])
def test_an_unknown_job_is_not_found(job_id: str, client: FlaskClient):
    answer = client.get(f"/jobs/{job_id}")
    assert answer.status_code == 404
    assert "There is no job" in answer.json["error"]


def test_every_shipped_row_is_loaded(shop):
    with shop.Sessions() as session:
        assert session.scalar(text("SELECT count(*) FROM example_account")) == 60
        assert session.scalar(text("SELECT count(*) FROM example_order")) == 4000


def test_the_shipped_files_are_what_their_generator_makes(tmp_path: Path):
    data = REPOSITORY / "example_project" / "data"
    copy = tmp_path / "generate.py"
    copy.write_text((data / "generate.py").read_text())
    subprocess.run([sys.executable, str(copy)], check=True, timeout=60)
    for name in ("accounts.csv", "orders.csv"):
        assert (tmp_path / name).read_bytes() == (data / name).read_bytes()


# -- the verdicts can be wrong ---------------------------------------------------------

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def seen(account: int, **changes: object) -> Seen:
    job_id = job_of(account)
    good = Seen(
        job_id=job_id,
        state="succeeded",
        attempt=1,
        max_attempts=3,
        deliveries=1,
        published_at=NOW,
        outbox_rows=0,
        reason=None,
        journal=("recorded", "published", "claimed", "succeeded"),
        waiting=0,
        quarantined=0,
        files=(f"reports/{job_id}.csv",),
        stamp=(1, 1),
        runs=1,
    )
    return replace(good, **changes)


ACCEPTED = (202, {"job_id": job_of(42), "new": True})
FOUND = (202, {"job_id": job_of(42), "new": False})
QUEUED = {
    "state": "queued",
    "attempt": 0,
    "deliveries": 0,
    "published_at": None,
    "outbox_rows": 1,
    "files": (),
    "stamp": None,
    "runs": 0,
}
UNPUBLISHED = seen(7, **QUEUED)
UNMARKED = seen(8, **{**QUEUED, "waiting": 1})
TWICE = seen(8, **{**QUEUED, "waiting": 2, "published_at": NOW, "outbox_rows": 0})
TWICE_END = seen(
    8, deliveries=2, journal=("recorded", "published", "claimed", "succeeded", "duplicate")
)
SETTLED_END = seen(
    9, deliveries=2, journal=("recorded", "published", "claimed", "succeeded", "duplicate")
)
RUNNING = seen(10, state="running")
ADOPTED = seen(10, attempt=2, deliveries=2)
DYING = seen(11, state="running", attempt=3, files=())
LOST = seen(
    11,
    state="quarantined",
    reason="lost_worker",
    attempt=3,
    journal=("claimed", "claimed", "claimed", "quarantined", "copied"),
    quarantined=1,
    files=(),
    runs=3,
)
EXHAUSTED = replace(LOST, job_id=job_of(12), reason="attempts_exhausted", runs=3, quarantined=2)
LISTED = [{"id": name, "reason": reason} for name, reason in QUARANTINED.items()]


def test_verdicts_on_good_evidence_are_right():
    for verdict in (
        undisturbed.judge(ACCEPTED, FOUND, seen(42)),
        before_publish.judge(UNPUBLISHED, seen(7)),
        before_mark.judge(UNMARKED, TWICE, TWICE_END),
        after_settle.judge(seen(9), SETTLED_END),
        before_settle.judge(RUNNING, ADOPTED),
        third_attempt.judge(0, DYING, LOST),
        third_error.judge(1, EXHAUSTED, seen(13), LISTED),
    ):
        assert verdict.ok, verdict
        assert str(verdict).startswith("OK ")


SECOND_FILE = ("reports/a.csv", "reports/b.csv")

#: Of the end of any job that succeeded: one thing that is not as it should be.
BAD_ENDS = [
    {"state": "running"},
    {"state": "quarantined", "reason": "permanent"},
    {"runs": 0},
    {"runs": 2},
    {"files": ()},
    {"files": SECOND_FILE},
    {"waiting": 1},
]


@pytest.mark.parametrize("change", BAD_ENDS)
def test_a_bad_end_makes_every_verdict_wrong(change: dict[str, object]):
    for verdict in (
        undisturbed.judge(ACCEPTED, FOUND, seen(42, **change)),
        before_publish.judge(UNPUBLISHED, seen(7, **change)),
        before_mark.judge(UNMARKED, TWICE, replace(TWICE_END, **change)),
        after_settle.judge(seen(9), replace(SETTLED_END, **change)),
        before_settle.judge(RUNNING, replace(ADOPTED, **change)),
        third_error.judge(1, EXHAUSTED, seen(13, **change), LISTED),
    ):
        assert not verdict.ok
        assert str(verdict).startswith("WRONG ")


@pytest.mark.parametrize(
    ("verdict", "part"),
    [
        (undisturbed.judge((500, {}), FOUND, seen(42)), "accepted"),
        (undisturbed.judge(ACCEPTED, ACCEPTED, seen(42)), "found the first job"),
        (undisturbed.judge(ACCEPTED, FOUND, seen(42, published_at=None)), "published"),
        (
            undisturbed.judge(ACCEPTED, FOUND, seen(42, journal=("recorded", "recorded"))),
            "recorded once",
        ),
        (before_publish.judge(replace(UNPUBLISHED, waiting=1), seen(7)), "nothing was published"),
        (before_publish.judge(replace(UNPUBLISHED, published_at=NOW), seen(7)), "nothing was"),
        (before_publish.judge(replace(UNPUBLISHED, outbox_rows=0), seen(7)), "outbox row"),
        (before_publish.judge(UNPUBLISHED, seen(7, deliveries=2)), "published once"),
        (before_mark.judge(replace(UNMARKED, waiting=0), TWICE, TWICE_END), "not marked"),
        (before_mark.judge(replace(UNMARKED, published_at=NOW), TWICE, TWICE_END), "not marked"),
        (before_mark.judge(UNMARKED, replace(TWICE, waiting=1), TWICE_END), "published twice"),
        (before_mark.judge(UNMARKED, TWICE, replace(TWICE_END, deliveries=1)), "delivered"),
        (before_mark.judge(UNMARKED, TWICE, replace(TWICE_END, journal=())), "duplicate"),
        (after_settle.judge(seen(9, state="running"), SETTLED_END), "at the death"),
        (after_settle.judge(seen(9, files=()), SETTLED_END), "file was there"),
        (after_settle.judge(seen(9), replace(SETTLED_END, deliveries=1)), "delivered again"),
        (after_settle.judge(seen(9), replace(SETTLED_END, stamp=(2, 2))), "first one"),
        (after_settle.judge(seen(9), replace(SETTLED_END, attempt=2)), "one attempt"),
        (before_settle.judge(seen(10), ADOPTED), "running at the death"),
        (before_settle.judge(replace(RUNNING, files=()), ADOPTED), "file was there"),
        (before_settle.judge(RUNNING, replace(ADOPTED, attempt=1)), "second attempt"),
        (before_settle.judge(RUNNING, replace(ADOPTED, stamp=(1, 2))), "first one"),
        (third_attempt.judge(0, DYING, replace(LOST, state="retrying")), "quarantine"),
        (third_attempt.judge(0, DYING, replace(LOST, reason="permanent")), "reason"),
        (third_attempt.judge(0, DYING, replace(LOST, attempt=2)), "three attempts"),
        (third_attempt.judge(1, DYING, LOST), "copy"),
        (third_attempt.judge(0, DYING, replace(LOST, waiting=1)), "goes round"),
        (third_attempt.judge(0, replace(DYING, attempt=2), LOST), "at the death"),
        (third_attempt.judge(0, DYING, replace(LOST, journal=())), "journal"),
        (third_attempt.judge(0, DYING, replace(LOST, files=SECOND_FILE)), "no file"),
        (third_attempt.judge(0, DYING, replace(LOST, runs=4)), "three times"),
        (third_error.judge(1, replace(EXHAUSTED, runs=2), seen(13), LISTED), "three times"),
        (third_error.judge(1, replace(EXHAUSTED, reason="permanent"), seen(13), LISTED), "reason"),
        (third_error.judge(2, EXHAUSTED, seen(13), LISTED), "copy"),
        (third_error.judge(1, EXHAUSTED, seen(13), LISTED[:1]), "list"),
    ],
)
def test_one_wrong_observation_makes_the_verdict_wrong(verdict, part: str):
    assert not verdict.ok
    assert any(part in text for text in verdict.wrong), verdict
