"""The caller's own row, written with a SQLAlchemy session."""

from __future__ import annotations

from sqlalchemy import Engine, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The caller's tables."""


class Order(Base):
    """What the caller is really about."""

    __tablename__ = "shop_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    customer: Mapped[str] = mapped_column(String(80))


def create(engine: Engine) -> None:
    """Make the table."""
    Base.metadata.create_all(engine)


def new(number: int) -> Order:
    """A row that is not in the database yet."""
    return Order(number=number, customer="a customer of the shop")
