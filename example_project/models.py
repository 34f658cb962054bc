"""The shop's own tables."""

from __future__ import annotations

from datetime import date, datetime, timezone

from sqlalchemy import DateTime, Engine, ForeignKey, String, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

CONNECT_TIMEOUT = 5


class Base(DeclarativeBase):
    pass


class Account(Base):
    """A customer.

    ``importing`` says that orders are being added right now: an export has to wait.
    """

    __tablename__ = "example_account"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    name: Mapped[str] = mapped_column(String(100))
    importing: Mapped[bool] = mapped_column(default=False)


class Order(Base):
    """What an account bought."""

    __tablename__ = "example_order"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id), index=True)
    date: Mapped[date]
    product: Mapped[str] = mapped_column(String(100))
    quantity: Mapped[int]
    unit_price_cents: Mapped[int]


class ExportRequest(Base):
    """Who asked for what: the business row that is committed together with the job."""

    __tablename__ = "example_export_request"

    job_id: Mapped[str] = mapped_column(String(255), primary_key=True)
    account_id: Mapped[int] = mapped_column(ForeignKey(Account.id))
    period: Mapped[str] = mapped_column(String(7))
    requested_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), default=lambda: datetime.now(timezone.utc)
    )


class Run(Base):
    """One line per time that the body of an export began: how the demonstration counts them."""

    __tablename__ = "example_run"

    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(String(255), index=True)
    attempt: Mapped[int]


def open_database(url: str) -> Engine:
    """The engine for the shop's own transactions; waits for an unreachable server for 5 s."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        # How long SQLite waits for another process's transaction.
        return create_engine(parsed, connect_args={"timeout": 30})
    return create_engine(parsed, connect_args={"connect_timeout": CONNECT_TIMEOUT})
