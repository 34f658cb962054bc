"""Makes the two CSV files beside it; the same ones every time.

Run it as ``python example_project/data/generate.py``.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from pathlib import Path

ACCOUNTS, ORDERS, SEED = 60, 4000, 42
FIRST_DAY, DAYS = date(2025, 10, 1), 182

TREES = ("Alder", "Ash", "Beech", "Birch", "Cedar", "Elm", "Hazel", "Larch", "Maple", "Rowan")
TRADES = ("Bakery", "Books", "Cycles", "Garden", "Pottery", "Tools")
PRODUCTS = {
    "notebook": 450,
    "pencils, box of 12": 690,
    "desk lamp": 3490,
    "paper, 500 sheets": 799,
    "stapler": 1250,
    "chair": 12900,
    "whiteboard": 8900,
    "envelopes, 100": 1120,
}


def main() -> None:
    """Write accounts.csv and orders.csv."""
    chance = random.Random(SEED)
    names = [f"{tree} {trade}" for trade in TRADES for tree in TREES]
    accounts = [(number, names[number - 1]) for number in range(1, ACCOUNTS + 1)]
    days = sorted(chance.randrange(DAYS) for _ in range(ORDERS))
    orders = []
    for number, day in enumerate(days, start=1):
        product, cents = chance.choice(list(PRODUCTS.items()))
        # Prices drift a little over the half year.
        price = round(cents * (1 + 0.08 * day / DAYS))
        account, quantity = chance.randint(1, ACCOUNTS), chance.randint(1, 12)
        moment = FIRST_DAY + timedelta(days=day)
        orders.append(
            (number, account, moment.isoformat(), product, quantity, f"{price / 100:.2f}")
        )
    _write("accounts.csv", ("id", "name"), accounts)
    header = ("id", "account_id", "date", "product", "quantity", "unit_price")
    _write("orders.csv", header, orders)


def _write(name: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with Path(__file__).with_name(name).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
