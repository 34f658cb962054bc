"""A month, such as ``2026-01``."""

from __future__ import annotations

import re
from datetime import date


class BadPeriod(ValueError):
    """Not a month: no further attempt will make it one."""


def days_of(period: str) -> tuple[date, date]:
    """The first day of a month, and the first day after it.

    Raises:
        BadPeriod: it is not a month written as ``YYYY-MM``.
    """
    match = re.fullmatch(r"([0-9]{4})-(0[1-9]|1[0-2])", period)
    if match is None or not 1 <= int(match[1]) < 9999:
        raise BadPeriod(f"a period is a month such as 2026-01, not {period[:40]!r}")
    year, month = int(match[1]), int(match[2])
    return date(year, month, 1), date(year + month // 12, month % 12 + 1, 1)
