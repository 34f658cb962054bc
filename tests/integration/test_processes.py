from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.processes import Processes
from tests.wait import eventually

PARENT_AND_CHILD = """
import os, signal, sys
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""


def children(process) -> list[int]:
    """Return the process ids that the program has printed."""
    return [int(word) for word in process.log().split() if word.isdigit() and word != "0"]


def exists(pid: int) -> bool:
    """Tell whether a process runs; a zombie does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_the_log_has_what_was_printed_and_wait_returns_the_exit_code(processes: Processes):
    process = processes.python("-c", "import sys; print('out'); sys.exit('err')")
    assert process.wait() == 1
    assert process.log().split() == ["out", "err"]
    assert not process.alive


def test_the_environment_and_the_repository_reach_the_program(processes: Processes):
    code = "import os, tests.wait; print(os.environ['GREETING'])"
    process = processes.python("-c", code, env={"GREETING": "hello"})
    assert process.wait() == 0, process.log()
    assert process.log().strip() == "hello"


def test_terminate_lets_the_program_end_in_its_own_way(processes: Processes):
    code = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(7)); print('up'); signal.pause()"
    )
    process = processes.python("-c", code)
    eventually(lambda: "up" in process.log())
    assert process.terminate() == 7


def test_kill_ends_the_children_too(processes: Processes):
    process = processes.python("-c", PARENT_AND_CHILD)
    eventually(lambda: children(process))
    process.kill()
    assert process.returncode == -signal.SIGKILL
    eventually(lambda: not exists(children(process)[0]))


def test_wait_for_a_program_that_goes_on_fails_with_its_log(processes: Processes):
    process = processes.python("-c", "import signal; print('busy'); signal.pause()")
    eventually(lambda: "busy" in process.log())
    with pytest.raises(AssertionError, match="busy"):
        process.wait(timeout=0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_outlives_a_pytest_that_is(number, processes: Processes, tmp_path: Path):
    test = tmp_path / "test_forever.py"
    test.write_text(
        "import signal\n"
        "def test_forever(processes):\n"
        f"    inner = processes.python('-c', {PARENT_AND_CHILD!r})\n"
        "    inner.log_path.rename('inner.log')\n"
        "    print('started', flush=True)\n"
        "    signal.pause()\n"
    )
    outer = processes.start(
        [
            *(sys.executable, "-m", "pytest", "-s", "-p", "tests.conftest", "-c", os.devnull),
            *("-p", "no:cacheprovider", str(test)),
        ],
        cwd=tmp_path,
    )
    inner = tmp_path / "inner.log"
    pid = eventually(
        lambda: int(inner.read_text().split()[0]), message=lambda: f"no child:\n{outer.log()}\n"
    )
    assert exists(pid)
    outer.send(number)
    outer.wait()
    eventually(lambda: not exists(pid))


def test_a_failed_test_shows_the_logs_of_its_processes(processes: Processes, tmp_path: Path):
    test = tmp_path / "test_failing.py"
    test.write_text(
        "def test_failing(processes):\n"
        "    processes.python('-c', 'print(6 * 111)', name='worker').wait()\n"
        "    raise AssertionError\n"
    )
    outer = processes.python(
        *("-m", "pytest", "-p", "tests.conftest", "-c", os.devnull),
        *("-p", "no:cacheprovider", str(test)),
        cwd=tmp_path,
    )
    assert outer.wait(60) == 1
    assert "log of worker-0" in outer.log()
    assert "666" in outer.log()
