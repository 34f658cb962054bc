from __future__ import annotations

import amqp
import pytest
from kombu import Connection
from redis import Redis
from sqlalchemy import create_engine, text

from tests.wait import eventually

databases_seen: set[str] = set()
brokers_seen: set[str] = set()


def test_the_database_answers_and_is_empty(database_url):
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE greeting (word TEXT NOT NULL)"))
        connection.execute(text("INSERT INTO greeting VALUES ('hello')"))
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT word FROM greeting")).all() == ["hello"]
    engine.dispose()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
def test_one_kind_of_database_can_be_asked_for(database_url):
    assert database_url.startswith("postgresql+psycopg2://")


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_has_a_database_of_its_own(turn, postgresql_url):
    assert postgresql_url not in databases_seen
    databases_seen.add(postgresql_url)
    engine = create_engine(postgresql_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE same_name (id INTEGER)"))
    engine.dispose()


def test_a_connection_left_open_does_not_keep_the_database(postgresql_server):
    engine = create_engine(postgresql_server.create_database("left_open"))
    connection = engine.connect()
    postgresql_server.drop_database("left_open")
    connection.invalidate()
    connection.close()
    engine.dispose()


def test_a_confirmed_message_can_be_counted_and_taken(rabbitmq_api):
    rabbitmq_api.declare("letters", **{"x-max-length": 5})
    rabbitmq_api.publish("letters", {"word": "hello"}, headers={"stamp": "blue"})
    assert rabbitmq_api.depth("letters") == 1
    message = rabbitmq_api.pop("letters")
    assert message.decode() == {"word": "hello"}
    assert message.headers["stamp"] == "blue"
    assert rabbitmq_api.pop("letters") is None
    assert rabbitmq_api.queues() == ["letters"]


def test_the_depth_of_a_queue_that_does_not_exist_is_an_error(rabbitmq_api):
    with pytest.raises(amqp.exceptions.NotFound):
        rabbitmq_api.depth("nowhere")


@pytest.mark.parametrize("turn", [1, 2])
def test_each_test_has_a_virtual_host_of_its_own(turn, rabbitmq_url, rabbitmq_api):
    assert rabbitmq_url == rabbitmq_api.url
    assert rabbitmq_url not in brokers_seen
    brokers_seen.add(rabbitmq_url)
    assert rabbitmq_api.queues() == []
    rabbitmq_api.declare("same_name")


def test_connections_can_be_closed_from_the_broker_side(rabbitmq_api):
    with Connection(rabbitmq_api.url) as connection:
        connection.connect()
        assert eventually(rabbitmq_api.close_connections) == 1
        with pytest.raises(connection.connection_errors):
            connection.drain_events(timeout=10)


def test_the_redis_database_is_empty_and_keeps_what_is_set(redis_url):
    with Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("greeting", "hello")
        assert client.get("greeting") == b"hello"


def test_each_test_has_a_redis_database_of_its_own(redis_url, redis_server):
    assert redis_server.fresh_database() != redis_url


@pytest.mark.parametrize("kind", ["redis", "filesystem"])
def test_kombu_carries_a_message(kind, request):
    if kind == "redis":
        connection = Connection(request.getfixturevalue("redis_url"))
    else:
        broker = request.getfixturevalue("filesystem_broker")
        connection = Connection(broker.broker_url, transport_options=broker.transport_options)
    with connection, connection.SimpleQueue("letters") as queue:
        queue.put("hello")
        message = queue.get(timeout=10)
        message.ack()
        assert message.payload == "hello"


@pytest.mark.parametrize("kind", ["postgresql", "rabbitmq", "redis"])
def test_a_proxy_reaches_the_server(kind, request, proxy_to):
    url = request.getfixturevalue(f"{kind}_url")
    url = proxy_to(url).url_for(url)
    if kind == "postgresql":
        engine = create_engine(url)
        with engine.connect() as connection:
            assert connection.scalar(text("SELECT 1")) == 1
        engine.dispose()
    else:
        with Connection(url) as connection:
            connection.connect()
            assert connection.connected
