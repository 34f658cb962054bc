"""What happens around the jobs: processes die at random, servers restart."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.processes import Processes, ProcessGroup
from tests.servers.postgresql import Postgresql
from tests.servers.rabbitmq import Rabbitmq

APP = "tests.soak.app"


class Roles:
    """Two dispatchers and two workers; each is started again when it is dead."""

    def __init__(self, processes: Processes, environment: dict[str, str]) -> None:
        self._processes = processes
        self._environment = environment
        self._running: dict[str, ProcessGroup] = {}

    def revive(self) -> None:
        """Start whatever does not run."""
        for name in ("dispatcher-1", "dispatcher-2", "worker-1", "worker-2"):
            process = self._running.get(name)
            if process is None or not process.alive:
                if process is not None:
                    # What it leaves behind, children of a killed worker, too.
                    process.kill()
                self._running[name] = self._start(name)

    def of(self, kind: str) -> list[ProcessGroup]:
        """The living processes of a kind."""
        return [p for name, p in self._running.items() if name.startswith(kind) and p.alive]

    def stop(self) -> None:
        """End all, in good order if they can."""
        for process in self._running.values():
            process.send(signal.SIGTERM)
        for process in self._running.values():
            try:
                process.wait(30)
            except AssertionError:
                process.kill()

    def logs(self) -> list[str]:
        """What all processes have printed."""
        return [process.log() for process in self._processes.started]

    def _start(self, name: str) -> ProcessGroup:
        if name.startswith("dispatcher"):
            arguments = ["outbox", "dispatch", "--loglevel", "WARNING"]
        else:
            arguments = ["worker", "-P", "prefork", "-c", "2", "-l", "WARNING"]
            arguments += ["--without-gossip", "--without-mingle", "-n", f"{name}@%h"]
        return self._processes.celery(APP, *arguments, env=self._environment, name=name)


#: Seconds for which a worker is frozen, at least and at most: its leases end meanwhile, others take
#: its jobs, and some of these still run when it goes on.
FREEZE = (6.5, 9.5)


class Chaos(threading.Thread):
    """Does something bad every second or so, until it is told to stop.

    :param happened: how often each thing happened.
    """

    def __init__(self, roles: Roles, postgresql: Postgresql, rabbitmq: Rabbitmq, seed: int) -> None:
        super().__init__(name="chaos", daemon=True)
        self._roles = roles
        self._postgresql = postgresql
        self._rabbitmq = rabbitmq
        self._dice = random.Random(seed)
        self._ends = threading.Event()
        self._frozen: list[tuple[float, int]] = []
        self.happened: Counter[str] = Counter()
        self.error: Exception | None = None

    def stop(self) -> None:
        """End it, and leave everything running."""
        self._ends.set()
        self.join(180)
        assert not self.is_alive(), "the chaos does not end"
        self._thaw(everything=True)

    def run(self) -> None:
        """Pick, do, and put back what died."""
        things: list[tuple[str, int, Callable[[], bool]]] = [
            ("dispatcher killed", 6, lambda: self._kill("dispatcher")),
            ("worker killed", 3, lambda: self._kill("worker")),
            ("worker's main process killed", 3, lambda: self._kill_main("worker")),
            ("pool process killed", 12, self._kill_child),
            ("worker frozen", 4, self._freeze),
            ("database restarted", 1, self._restart_database),
            ("broker restarted", 1, self._restart_broker),
        ]
        try:
            while not self._ends.wait(self._dice.uniform(0.5, 2.5)):
                name, _, act = self._dice.choices(things, weights=[w for _, w, _ in things])[0]
                self.happened[name] += act()
                self._thaw()
                self._roles.revive()
        except Exception as error:
            self.error = error

    def _restart_database(self) -> bool:
        self._postgresql.stop()
        self._postgresql.start_again()
        return True

    def _restart_broker(self) -> bool:
        self._rabbitmq.halt()
        self._rabbitmq.start_again()
        return True

    def _kill(self, kind: str) -> bool:
        found = self._roles.of(kind)
        if found:
            self._dice.choice(found).kill()
        return bool(found)

    def _kill_main(self, kind: str) -> bool:
        found = self._roles.of(kind)
        if found:
            self._dice.choice(found).send(signal.SIGKILL)
        return bool(found)

    def _freeze(self) -> bool:
        """Stop a worker with its children in whatever they do; it goes on later, and knows
        nothing of it."""
        stopped = {pid for _, pid in self._frozen}
        found = [worker for worker in self._roles.of("worker") if worker.pid not in stopped]
        if not found:
            return False
        pid = self._dice.choice(found).pid
        os.killpg(pid, signal.SIGSTOP)
        self._frozen.append((time.monotonic() + self._dice.uniform(*FREEZE), pid))
        return True

    def _thaw(self, everything: bool = False) -> None:
        now = time.monotonic()
        for until, pid in [each for each in self._frozen if everything or each[0] <= now]:
            self._frozen.remove((until, pid))
            # Unless it was killed meanwhile.
            if any(worker.pid == pid for worker in self._roles.of("worker")):
                os.killpg(pid, signal.SIGCONT)

    def _kill_child(self) -> bool:
        found = [child for worker in self._roles.of("worker") for child in _children(worker.pid)]
        if not found:
            return False
        try:
            os.kill(self._dice.choice(found), signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except FileNotFoundError:
        return []
