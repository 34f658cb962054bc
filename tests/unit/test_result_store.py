from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from celery_outbox import ConfigurationError, FileStore, ResultStore
from celery_outbox.exceptions import InvalidStoreKey
from celery_outbox.execute.result_store import open_store
from tests.processes import Processes
from tests.unit.test_result_key import BAD_KEYS
from tests.wait import eventually

KEY = "reports/export-42.csv"


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "results")


def files(store: FileStore) -> list[str]:
    return sorted(str(p.relative_to(store.root)) for p in store.root.rglob("*") if p.is_file())


@pytest.mark.parametrize(
    ("data", "stored"),
    [
        (b"a\x00b", b"a\x00b"),
        (b"", b""),
        ("día", "día".encode()),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        ([b"a", b"b"], b"ab"),
        ((part for part in (b"a", b"b")), b"ab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_read_as_it_was_written(store, data, stored):
    assert store.write(KEY, data) is True
    assert store.exists(KEY)
    assert store.read(KEY) == stored
    assert files(store) == [KEY]


def test_the_first_write_wins(store):
    assert store.write(KEY, b"first")
    assert store.write(KEY, b"second") is False
    assert store.read(KEY) == b"first"
    assert files(store) == [KEY]


def test_of_many_threads_one_writes_and_all_see_its_whole_value(store):
    ready, outcomes = threading.Barrier(8), []

    def write(number: int) -> None:
        ready.wait()
        outcomes.append(store.write(KEY, [bytes([number]) * 1000] * 50))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [False] * 7 + [True]
    assert len(set(store.read(KEY))) == 1
    assert len(store.read(KEY)) == 50_000
    assert files(store) == [KEY]


def test_of_many_processes_one_writes(store, processes: Processes, tmp_path):
    code = (
        "import sys, time, pathlib\n"
        "from celery_outbox.execute.result_store import FileStore\n"
        "root, go, name = sys.argv[1:]\n"
        "pathlib.Path(go + name).touch()\n"
        "while not pathlib.Path(go).exists(): pass\n"
        f"print(FileStore(root).write({KEY!r}, name.encode() * 100_000))\n"
    )
    go = tmp_path / "go"
    writers = [
        processes.python("-c", code, str(store.root), str(go), name) for name in ("1", "2", "3")
    ]
    eventually(lambda: len(list(tmp_path.glob("go?"))) == 3)
    go.touch()
    assert [writer.wait() for writer in writers] == [0, 0, 0], writers[0].log()
    assert sorted(writer.log().strip() for writer in writers) == ["False", "False", "True"]
    assert len(set(store.read(KEY))) == 1
    assert files(store) == [KEY]


def test_a_write_that_is_killed_leaves_no_value(store, processes: Processes):
    code = (
        "import os, sys\n"
        "from celery_outbox.execute.result_store import FileStore\n"
        "def chunks():\n"
        "    yield b'half'\n"
        "    os.kill(os.getpid(), 9)\n"
        f"FileStore(sys.argv[1]).write({KEY!r}, chunks())\n"
    )
    assert processes.python("-c", code, str(store.root)).wait() == -9
    assert not store.exists(KEY)
    assert store.write(KEY, b"whole")
    assert store.read(KEY) == b"whole"


def test_a_source_that_fails_half_way_leaves_nothing_at_all(store):
    def chunks():
        yield b"half"
        raise ConnectionError("the database went away")

    with pytest.raises(ConnectionError):
        store.write(KEY, chunks())
    assert not store.exists(KEY)
    assert files(store) == []


@pytest.mark.parametrize("step", ["write", "fsync", "link"])
def test_a_disk_that_is_full_leaves_nothing_at_all_whenever_it_shows(store, monkeypatch, step):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    def chunks():
        yield b"half"
        if step == "write":
            full()

    if step != "write":
        monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match="No space left"):
        store.write(KEY, chunks())
    assert not store.exists(KEY)
    assert files(store) == []
    monkeypatch.undo()
    assert store.write(KEY, b"whole")
    assert store.read(KEY) == b"whole"


def test_chunks_are_streamed_and_not_collected(store):
    seen = []

    def chunks():
        for _ in range(3):
            temporary = next(store.root.rglob("*.tmp"))
            seen.append(temporary.stat().st_size)
            yield b"x" * 1_000_000

    store.write(KEY, chunks())
    assert seen[0] < seen[1] < seen[2]


def test_the_value_and_its_folders_are_flushed_to_the_disk(store, monkeypatch):
    flushed = []
    fsync = os.fsync

    def record(handle):
        flushed.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    store.write(KEY, b"x")
    assert flushed[0].endswith(".tmp")
    assert flushed[1:] == [
        str(store.root / "reports"),
        str(store.root),
        str(store.root.parent),
    ]


@pytest.mark.parametrize("key", BAD_KEYS, ids=lambda key: repr(key[:12]))
@pytest.mark.parametrize("operation", ["exists", "read", "write"])
def test_a_key_that_leaves_the_store_or_is_no_name_is_refused(store, operation, key):
    arguments = (key, b"x") if operation == "write" else (key,)
    with pytest.raises(InvalidStoreKey):
        getattr(store, operation)(*arguments)
    assert not store.root.exists()


def test_the_longest_names_of_a_file_system_can_be_used(store):
    for name in ("x" * 255, "\u00e9" * 127, "\U0001f4c8" * 63):
        assert store.write(name, b"x")
        assert store.read(name) == b"x"


def test_a_missing_value_is_a_key_error_and_does_not_exist(store):
    assert not store.exists(KEY)
    with pytest.raises(KeyError):
        store.read(KEY)


def test_a_folder_is_not_a_value(store):
    store.write("a/b", b"x")
    assert not store.exists("a")
    with pytest.raises((KeyError, OSError)):
        store.read("a")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = FileStore(tmp_path / "file" / "results")
    with pytest.raises(OSError, match="file"):
        store.write(KEY, b"x")
    assert not store.exists(KEY)


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path, processes: Processes):
    # Permissions do not bind root, so the writer drops its rights first.
    root = tmp_path / "results"
    root.mkdir(mode=0o555)
    code = (
        "import os, sys\n"
        "from celery_outbox.execute.result_store import FileStore\n"
        "os.geteuid() or os.seteuid(65534)\n"
        "try: FileStore(sys.argv[1]).write('key', b'x')\n"
        "except OSError as error: print(type(error).__name__)\n"
    )
    writer = processes.python("-c", code, str(root))
    assert writer.wait() == 0
    assert "PermissionError" in writer.log()
    assert list(root.iterdir()) == []


def test_a_file_store_is_a_result_store(store):
    assert isinstance(store, ResultStore)


def test_a_store_is_opened_by_its_url(tmp_path):
    assert open_store(f"file://{tmp_path}/a%20b").root == tmp_path / "a b"
    assert open_store(f"file://localhost{tmp_path}").root == tmp_path


@pytest.mark.parametrize("url", ["", "results", "file:", "file://host/x", "s3://k:s3cret@b/x"])
def test_a_url_of_no_store_says_what_to_write_without_telling_secrets(url):
    with pytest.raises(ConfigurationError, match=r"Example: file:///") as raised:
        open_store(url)
    assert "s3cret" not in str(raised.value)
