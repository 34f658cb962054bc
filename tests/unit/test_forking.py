"""No fork falls into a block of another thread, and none waits for ever for its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys, threading
from celery_outbox.execute.forking import ForkGate

patience, ends = float(sys.argv[1]), sys.argv[2] == "ends"
gate, done = ForkGate(patience), []
inside, leave = threading.Event(), threading.Event()

def work():
    with gate:
        inside.set()
        leave.wait(60)
        done.append("done")

threading.Thread(target=work, daemon=True).start()
inside.wait()
if ends:
    threading.Timer(0.3, leave.set).start()
child = os.fork()
if child == 0:
    with gate:
        # The child's is its own, whoever held the parent's.
        os._exit(10 + len(done))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
leave.set()
with gate:
    print(len(done))
"""


@pytest.mark.parametrize(
    ("patience", "end", "done_at_the_fork"), [(60, "ends", 1), (0.2, "goes on", 0)]
)
def test_a_fork_waits_for_the_block_as_long_as_its_patience(patience, end, done_at_the_fork):
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, str(patience), end],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [str(10 + done_at_the_fork), "1"]
