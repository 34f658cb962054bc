"""Makes the database and the broker ready, or says in one line why they cannot be used."""

from __future__ import annotations

from urllib.parse import urlsplit

from celery import Celery
from kombu.exceptions import KombuError
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.orm import Session

from celery_outbox import Outbox, OutboxError
from example_project.load import load
from example_project.models import Base, open_database
from example_project.play.broker import Broker
from example_project.play.filesystem_broker import FilesystemBroker
from example_project.play.report import say
from example_project.settings import Settings

#: The brokers, by the beginning of their URLs.
BROKERS = {
    "filesystem": "filesystem",
    "amqp": "RabbitMQ",
    "amqps": "RabbitMQ",
    "pyamqp": "RabbitMQ",
    "redis": "Redis",
    "rediss": "Redis",
}


class Unusable(Exception):
    """A server cannot be used; the text is one line for the person who named it."""


def prepare_database(settings: Settings, outbox: Outbox) -> Engine:
    """Make this example's tables anew, and fill them from the CSV files.

    Raises:
        Unusable: the database cannot be used.
    """
    try:
        outbox.engine  # noqa: B018 - whether the URL is one
        engine = open_database(settings.database_url)
        with engine.begin() as connection:
            outbox.tables.metadata.drop_all(connection)
            Base.metadata.drop_all(connection)
            Base.metadata.create_all(connection)
        outbox.init()
        with Session(engine) as session, session.begin():
            accounts, orders = load(session)
    except OutboxError as error:
        raise Unusable(f"--database: {error}") from error
    except DBAPIError as error:
        raise Unusable(f"The database cannot be used: {_first_line(error.orig)}") from error
    except SQLAlchemyError as error:
        raise Unusable(f"The database cannot be used: {_first_line(error)}") from error
    say(f"database  {engine.dialect.name}, {accounts} accounts and {orders} orders")
    return engine


def check_broker_url(url: str) -> None:
    """Whether the URL is one of a broker that the demonstration knows.

    Raises:
        Unusable: it is not.
    """
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in BROKERS:
        raise Unusable("--broker: the URL must start with amqp:// or redis://")
    try:
        urlsplit(url).port  # noqa: B018 - whether it is one
    except ValueError as error:
        raise Unusable("--broker: the URL's port is not a number") from error


def prepare_broker(settings: Settings, app: Celery, outbox: Outbox) -> Broker:
    """Make this example's queues anew.

    Raises:
        Unusable: the broker cannot be used.
    """
    kind = BROKERS[settings.broker_url.partition("://")[0]]
    try:
        broker = _open_broker(kind, settings, app, outbox)
        broker.prepare()
    except ImportError as error:
        raise Unusable(f"--broker: its driver is not installed ({error.name})") from error
    except (OSError, KombuError, *app.connection_for_write().connection_errors) as error:
        raise Unusable(f"The broker cannot be used: {_first_line(error)}") from error
    say(f"broker    {kind}")
    return broker


def _open_broker(kind: str, settings: Settings, app: Celery, outbox: Outbox) -> Broker:
    if kind == "filesystem":
        return FilesystemBroker(app, outbox, settings.broker_folder)
    if kind == "Redis":
        # Its client is only there where Redis is used.
        from example_project.play.redis_broker import RedisBroker

        return RedisBroker(app, outbox)
    return Broker(app, outbox)


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
