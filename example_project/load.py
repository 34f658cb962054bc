"""Reads the shop's accounts and orders from the CSV files in ``data/``."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path

from sqlalchemy import insert
from sqlalchemy.orm import Session

from example_project.models import Account, Order

FOLDER = Path(__file__).parent / "data"


def load(session: Session) -> tuple[int, int]:
    """Fill the empty tables; returns how many accounts and orders there are."""
    accounts = [{"id": int(row["id"]), "name": row["name"]} for row in _rows("accounts.csv")]
    orders = [
        {
            "id": int(row["id"]),
            "account_id": int(row["account_id"]),
            "date": date.fromisoformat(row["date"]),
            "product": row["product"],
            "quantity": int(row["quantity"]),
            "unit_price_cents": int(Decimal(row["unit_price"]) * 100),
        }
        for row in _rows("orders.csv")
    ]
    session.execute(insert(Account), accounts)
    session.execute(insert(Order), orders)
    return len(accounts), len(orders)


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)
