from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_outbox.store.engine import autocommit


class Driver:
    """A driver's connection; a signal comes when it has been told something for the n-th time."""

    def __init__(self, signal_at: int, error: type[Exception]) -> None:
        self.told: list[bool] = []
        self._signal_at = signal_at
        self._error = error

    @property
    def autocommit(self) -> bool:
        return self.told[-1] if self.told else False

    @autocommit.setter
    def autocommit(self, value: bool) -> None:
        self.told.append(value)
        if len(self.told) == self._signal_at:
            raise self._error


def connection_of(driver: Driver) -> Any:
    dbapi = SimpleNamespace(Error=ConnectionError)
    return SimpleNamespace(
        connection=SimpleNamespace(dbapi_connection=driver),
        dialect=SimpleNamespace(loaded_dbapi=dbapi),
    )


@pytest.mark.parametrize("signal_at", [1, 2])
def test_a_soft_time_limit_ends_autocommit_and_is_not_lost(signal_at: int):
    driver = Driver(signal_at, SoftTimeLimitExceeded)
    with pytest.raises(SoftTimeLimitExceeded), autocommit(connection_of(driver)):
        pass
    assert driver.told == [True, False]


def test_a_connection_that_was_lost_need_not_end_autocommit():
    driver = Driver(2, ConnectionError)
    with autocommit(connection_of(driver)):
        pass
    assert driver.told == [True, False]
