from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields
from types import SimpleNamespace

import pytest

from celery_outbox import ConfigurationError, Outbox
from celery_outbox.config import Config
from celery_outbox.core.retry import RetryPolicy
from tests.factories import make_app, make_stock_app

PASSWORD_URL = "postgresql+psycopg2://shop:s3cret@db/shop"

#: Values that no setting of the kind takes.
WRONG = {
    "str": [None, 1, True, b"x", ["x"]],
    "str | None": [1, True, b"x", ["x"]],
    "bool": [None, 0, 1, "yes"],
    "int": [None, True, 1.5, "1"],
    "float": [None, True, "1", [1]],
}
NUMBERS = [field.name for field in fields(Config) if str(field.type) in ("int", "float")]


def read(**settings) -> Config:
    conf = {f"outbox_{name}": value for name, value in settings.items()}
    return Config.from_conf(make_app(**conf).conf)


@pytest.mark.parametrize(
    ("name", "value"),
    [(field.name, value) for field in fields(Config) for value in WRONG[str(field.type)]],
    ids=str,
)
def test_a_setting_of_the_wrong_type_is_named(name, value):
    with pytest.raises(ConfigurationError, match=f"^Setting outbox_{name} is not usable: "):
        read(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")], ids=str)
def test_a_number_that_means_nothing_is_named(name, value):
    with pytest.raises(ConfigurationError, match=f"outbox_({name}|retry)"):
        read(**{name: value})


@pytest.mark.parametrize(
    "name",
    [name for name in NUMBERS if name not in ("retry_delay", "retry_max_delay", "retry_jitter")],
)
def test_zero_is_refused_where_it_would_stop_everything(name):
    with pytest.raises(ConfigurationError, match="is not usable"):
        read(**{name: 0})


def test_an_unknown_setting_is_an_error_that_suggests_the_known_one():
    with pytest.raises(ConfigurationError, match=r"Did you mean outbox_database_url\?"):
        read(databse_url="sqlite://")
    with pytest.raises(ConfigurationError, match="outbox_frobnicate is not usable: there is no"):
        read(frobnicate=1)


def test_settings_of_others_are_left_alone():
    assert Config.from_conf(make_app(my_outbox_thing=1, outboxes=2).conf) == Config()


@pytest.mark.parametrize("namespace", ["CELERY", "SHOP"])
def test_settings_may_have_the_namespace_of_the_app(namespace):
    app = make_stock_app()
    settings = {f"{namespace}_OUTBOX_MAX_ATTEMPTS": 7, f"{namespace}_BROKER_URL": "memory://"}
    app.config_from_object(SimpleNamespace(**settings), namespace=namespace)
    assert Outbox(app).config.max_attempts == 7


def test_an_unknown_setting_is_noticed_behind_a_namespace_too():
    app = make_stock_app()
    app.config_from_object(SimpleNamespace(CELERY_OUTBOX_MAX_ATTEMTPS=7), namespace="CELERY")
    with pytest.raises(ConfigurationError, match="Did you mean outbox_max_attempts"):
        _ = Outbox(app).config


def test_a_setting_in_upper_case_is_refused_where_celery_does_not_read_it():
    app = make_app()
    app.config_from_object(SimpleNamespace(OUTBOX_MAX_ATTEMPTS=1, OUTBOX_OF_OTHERS=1))
    with pytest.raises(ConfigurationError, match=r"outbox_max_attempts.*Write it in lower case"):
        _ = Outbox(app).config


def test_what_is_not_in_the_namespace_of_the_app_is_not_a_setting():
    app = make_app()
    settings = SimpleNamespace(OUTBOX_RETENTION=1, OUTBOX_LEASE="theirs", CELERY_OUTBOX_LEASE=30)
    app.config_from_object(settings, namespace="CELERY")
    app.conf.outbox_max_attempts = 2
    config = Outbox(app).config
    assert (config.lease, config.max_attempts) == (30, 2)


def test_what_is_given_in_code_overrules_the_apps_settings():
    outbox = Outbox(make_app(outbox_max_attempts=7, outbox_lease=90), max_attempts=2)
    assert (outbox.config.max_attempts, outbox.config.lease) == (2, 90)


def test_a_heartbeat_that_would_let_leases_end_is_refused():
    with pytest.raises(ConfigurationError, match=r"heartbeat_interval.*at most half of outbox_le"):
        read(lease=60, heartbeat_interval=31)
    assert read(lease=60, heartbeat_interval=30)


def test_a_dispatch_lease_that_ends_while_the_broker_is_waited_for_is_refused():
    with pytest.raises(ConfigurationError, match=r"dispatch_lease.*twice outbox_publish_timeout"):
        read(dispatch_lease=29, publish_timeout=15)
    assert read(dispatch_lease=30, publish_timeout=15)


@pytest.mark.parametrize("prefix", ["", "a b", 'a"b', "a;drop", "ä_", "a.b", "a" * 60])
def test_a_table_prefix_that_gives_no_names_for_tables_is_refused(prefix):
    with pytest.raises(ConfigurationError, match="outbox_table_prefix"):
        read(table_prefix=prefix)


@pytest.mark.parametrize("name", ["dead_letter", "error_detail"])
def test_a_choice_names_what_there_is_to_choose_from(name):
    with pytest.raises(ConfigurationError, match=r"'sometimes' is not one of \('"):
        read(**{name: "sometimes"})


@pytest.mark.parametrize("value", [PASSWORD_URL.encode(), [PASSWORD_URL], (PASSWORD_URL,)])
def test_no_message_has_the_password_of_the_database(value):
    with pytest.raises(ConfigurationError) as raised:
        read(database_url=value)
    assert "s3cret" not in str(raised.value)


def test_a_setting_in_code_that_does_not_exist_is_named_as_in_the_configuration():
    with pytest.raises(ConfigurationError, match="Did you mean outbox_database_url"):
        _ = Outbox(make_app(), databse_url=PASSWORD_URL).config


def test_the_retry_settings_make_the_policy():
    config = read(max_attempts=5, retry_delay=1, retry_factor=3, retry_max_delay=60, retry_jitter=0)
    assert config.retry_policy == RetryPolicy(5, 1, 3, 60, 0)


def test_settings_cannot_be_changed_afterwards():
    with pytest.raises(FrozenInstanceError):
        read().lease = 1


def test_every_setting_is_documented():
    for field in fields(Config):
        assert f"\n    {field.name}:" in inspect.cleandoc(Config.__doc__)
