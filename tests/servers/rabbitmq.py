"""A private RabbitMQ with its management plugin, or the one that the environment names."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from kombu import Connection
from kombu.message import Message

from tests.processes import ProcessGroup
from tests.servers.install import find_or_install
from tests.servers.ports import free_port
from tests.servers.startup import wait_until_ready
from tests.watchdog import Watchdog

VARIABLE = "OUTBOX_TEST_RABBITMQ_URL"
API_VARIABLE = "OUTBOX_TEST_RABBITMQ_API_URL"


class Rabbitmq:
    """A server in which each test has a virtual host of its own.

    :param url: the AMQP URL of an administrator.
    :param api_url: the management plugin's URL, without credentials.
    :param mapper: the port mapper of a private server.
    :param pid_file: has the process id of a private server itself.
    :param environment: of a private server's processes.
    :param run: starts a private server; its start script is the process.
    """

    def __init__(
        self,
        url: str,
        api_url: str,
        mapper: ProcessGroup | None = None,
        pid_file: Path | None = None,
        environment: dict[str, str] | None = None,
        run: Callable[[], ProcessGroup] | None = None,
    ) -> None:
        self.url = url
        self.pid_file = pid_file
        self._process: ProcessGroup | None = None
        self._mapper = mapper
        self._environment = environment
        self._run = run
        self.api_url = api_url.rstrip("/")
        parts = urlsplit(url)
        self._user = unquote(parts.username or "guest")
        self._password = unquote(parts.password or "guest")
        # A proxy in the environment is for the outside world.
        self._opener = build_opener(ProxyHandler({}))

    @classmethod
    def start(cls, watchdog: Watchdog, *, private: bool = False) -> Rabbitmq:
        """Start a private server in a temporary folder, or take the one in the environment.

        :param private: start one in any case.
        :raises MissingServer: there is none and none can be installed.
        """
        named = os.environ.get(VARIABLE)
        if named and not private:
            api = os.environ.get(API_VARIABLE) or f"http://{urlsplit(named).hostname}:15672"
            return cls(named, _without_credentials(api))
        program = find_or_install(_find_program, package="rabbitmq-server", variable=VARIABLE)
        folder = Path(tempfile.mkdtemp(prefix="outbox-rabbitmq-"))
        watchdog.watch_folder(folder)
        port, api_port, mapper_port = free_port(), free_port(), free_port()
        environment = _write_configuration(folder, port, api_port, mapper_port)
        # Erlang would start the port mapper as a daemon that outlives everything; started here it
        # stays in the foreground and is ended with the rest.
        mapper = ProcessGroup(
            [_find_mapper(), "-address", "127.0.0.1", "-port", str(mapper_port)],
            log=folder / "epmd.log",
            watchdog=watchdog,
            env=environment,
            cwd=folder,
        )
        server = cls(
            f"amqp://guest:guest@127.0.0.1:{port}/",
            f"http://127.0.0.1:{api_port}",
            mapper,
            folder / "pid",
            environment,
            partial(
                ProcessGroup,
                [program],
                log=folder / "server.log",
                watchdog=watchdog,
                env=environment,
                cwd=folder,
            ),
        )
        server.start_again()
        return server

    def start_again(self) -> None:
        """Start a private server, after :meth:`halt` with what it had stored."""
        assert self._run is not None, "it is not a private server"
        self._process = self._run()
        wait_until_ready("RabbitMQ", self._process, self._answers, deadline=120.0)

    @property
    def is_private(self) -> bool:
        """Whether it was started here, so that a test may disturb all of it."""
        return self._environment is not None

    def limit_memory(self, fraction: float) -> None:
        """Set the share of the machine's memory at which a private server blocks publishers.

        :param fraction: 0 blocks at once; RabbitMQ's default is 0.4.
        """
        self._control("set_vm_memory_high_watermark", str(fraction))

    def limit_delivery(self, seconds: float, tick: float = 60.0) -> None:
        """Set how long a private server waits for an acknowledgement; for channels made later.

        :param seconds: RabbitMQ's default is 1800.
        :param tick: how often it looks, in seconds; RabbitMQ's default is 60.
        """
        settings = {"consumer_timeout": seconds, "channel_tick_interval": tick}
        self._control(
            "eval",
            ", ".join(
                f"application:set_env(rabbit, {name}, {int(value * 1000)})"
                for name, value in settings.items()
            )
            + ".",
        )

    def set_policy(self, vhost: str, *arguments: str) -> None:
        """Run ``rabbitmqctl set_policy`` for a virtual host of a private server."""
        self._control("set_policy", "-p", vhost, *arguments)

    def _control(self, *arguments: str) -> None:
        assert self._environment is not None, "it is not a private server"
        program = Path(_find_program() or "").with_name("rabbitmqctl")
        done = subprocess.run(
            [str(program), "-n", self._environment["RABBITMQ_NODENAME"], *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout

    def create_vhost(self, name: str) -> str:
        """Create an empty virtual host and return its AMQP URL."""
        self.call("PUT", f"/vhosts/{quote(name, safe='')}")
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        user = quote(self._user, safe="")
        self.call("PUT", f"/permissions/{quote(name, safe='')}/{user}", everything)
        return urlsplit(self.url)._replace(path="/" + quote(name, safe="")).geturl()

    def delete_vhost(self, name: str) -> None:
        """Delete a virtual host, and with it the connections that are open to it."""
        self.call("DELETE", f"/vhosts/{quote(name, safe='')}")

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the management plugin and return the decoded answer, or None for an empty one.

        :param path: what follows ``/api``, quoted.
        :raises urllib.error.HTTPError: the answer is an error.
        """
        login = base64.b64encode(f"{self._user}:{self._password}".encode()).decode()
        request = Request(
            f"{self.api_url}/api{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Basic {login}", "Content-Type": "application/json"},
        )
        with self._opener.open(request, timeout=30) as response:
            content = response.read()
        return json.loads(content) if content else None

    def halt(self) -> None:
        """Kill a private server; it can be started again."""
        if self._process is None or self.pid_file is None:
            return
        if self._process.alive:
            # An orderly shutdown takes six seconds. Killed together with its start script the
            # server would be left to init to reap, and a container may have none that does.
            os.kill(int(self.pid_file.read_text()), signal.SIGKILL)
            self._process.wait()
        self._process.kill()

    def stop(self) -> None:
        """End a private server and its port mapper; leave any other alone."""
        self.halt()
        if self._mapper is not None:
            self._mapper.kill()

    def _answers(self) -> bool:
        # The plugin answers before the node takes connections.
        with Connection(self.url, connect_timeout=5) as connection:
            connection.connect()
        return bool(self.call("GET", "/overview"))


class RabbitmqApi:
    """What a test asks and does about the virtual host of :attr:`url`, beside the product.

    :param server: the server.
    :param vhost: the virtual host's name.
    :param url: its AMQP URL.
    """

    def __init__(self, server: Rabbitmq, vhost: str, url: str) -> None:
        self.url = url
        self.vhost = vhost
        self._server = server
        self._path = quote(vhost, safe="")

    def depth(self, queue: str) -> int:
        """Return how many messages are ready in a queue, exactly and now.

        :raises amqp.exceptions.NotFound: there is no such queue.
        """
        with Connection(self.url) as connection, connection.channel() as channel:
            return int(channel.queue_declare(queue=queue, passive=True).message_count)

    def unacknowledged(self, queue: str) -> int:
        """Return how many messages consumers have taken and not answered, a second ago.

        :raises TypeError: the server has not counted yet.
        """
        path = f"/queues/{self._path}/{quote(queue, safe='')}?columns=messages_unacknowledged"
        return int(self._server.call("GET", path)["messages_unacknowledged"])

    def kind(self, queue: str) -> str:
        """Return the type of a queue: classic or quorum."""
        path = f"/queues/{self._path}/{quote(queue, safe='')}?columns=type"
        return str(self._server.call("GET", path)["type"])

    def queues(self) -> list[str]:
        """Return the names of all queues, sorted."""
        found = self._server.call("GET", f"/queues/{self._path}?columns=name")
        return sorted(queue["name"] for queue in found)

    def declare(self, queue: str, **arguments: Any) -> None:
        """Create a durable queue.

        :param arguments: the queue's ``x-`` arguments, such as ``x-max-length``.
        """
        with Connection(self.url) as connection, connection.channel() as channel:
            channel.queue_declare(queue=queue, durable=True, auto_delete=False, arguments=arguments)

    def publish(self, queue: str, body: Any, **properties: Any) -> None:
        """Publish one message to a queue and wait for the broker's confirm.

        :param properties: what ``kombu.Producer.publish`` takes, such as ``headers``.
        """
        options = {"confirm_publish": True}
        with Connection(self.url, transport_options=options) as connection:
            connection.Producer().publish(body, routing_key=queue, **properties)

    def pop(self, queue: str) -> Message | None:
        """Take one message off a queue and return it, or None when none is ready."""
        with Connection(self.url) as connection, connection.channel() as channel:
            message = channel.basic_get(queue=queue, no_ack=True)
            return None if message is None else channel.message_to_python(message)

    def set_policy(self, pattern: str, definition: dict[str, Any]) -> None:
        """Set a policy for the queues whose names match a pattern."""
        body = {"pattern": pattern, "definition": definition, "apply-to": "queues"}
        self._server.call("PUT", f"/policies/{self._path}/test", body)

    def close_connections(self) -> int:
        """Close all connections from the server's side and return how many there were."""
        found = self._server.call("GET", f"/vhosts/{self._path}/connections")
        for connection in found:
            self._server.call("DELETE", f"/connections/{quote(connection['name'], safe='')}")
        return len(found)


def _find_program() -> str | None:
    # Debian's own rabbitmq-server is a wrapper that insists on the system's user and folders.
    direct = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
    return str(direct) if direct.exists() else shutil.which("rabbitmq-server")


def _find_mapper() -> str:
    bundled = sorted(Path("/usr/lib/erlang").glob("erts-*/bin/epmd"))
    return shutil.which("epmd") or str(bundled[-1])


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _write_configuration(
    folder: Path, port: int, api_port: int, mapper_port: int
) -> dict[str, str]:
    """Write the server's files and return its environment."""
    (folder / "rabbitmq.conf").write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\n"
        "management.tcp.ip = 127.0.0.1\n"
        f"management.tcp.port = {api_port}\n"
        # Every second, so that a new connection is soon listed.
        "collect_statistics_interval = 1000\n"
        "management.sample_retention_policies.global.minute = 1\n"
        "management.sample_retention_policies.basic.minute = 1\n"
        "management.sample_retention_policies.detailed.10 = 1\n"
        "disk_free_limit.absolute = 50MB\n"
    )
    (folder / "enabled_plugins").write_text("[rabbitmq_management].\n")
    (folder / "environment.conf").write_text("")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RABBITMQ_")}
    return {
        **kept,
        "HOME": str(folder),
        "ERL_EPMD_PORT": str(mapper_port),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_CONF_ENV_FILE": str(folder / "environment.conf"),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "enabled_plugins"),
        "RABBITMQ_NODENAME": f"outbox-{port}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_PID_FILE": str(folder / "pid"),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
            "-kernel inet_dist_use_interface {127,0,0,1} -start_epmd false"
        ),
    }
