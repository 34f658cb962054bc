"""Where the shop's database, broker and files are; read from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DATABASE, BROKER, FOLDER = "EXAMPLE_DATABASE_URL", "EXAMPLE_BROKER_URL", "EXAMPLE_FOLDER"


@dataclass(frozen=True)
class Settings:
    """Three values, the same in every process of the shop.

    Attributes:
        database_url: a SQLAlchemy URL.
        broker_url: a kombu URL; ``filesystem://`` keeps the messages in ``folder``.
        folder: where the reports go.
    """

    database_url: str
    broker_url: str
    folder: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """The settings of this process; what is not set needs no server."""
        folder = Path(environment.get(FOLDER, "example_files")).absolute()
        return cls.of(folder, environment.get(DATABASE), environment.get(BROKER))

    @classmethod
    def of(cls, folder: Path, database_url: str | None, broker_url: str | None) -> Settings:
        """Settings with SQLite and files in ``folder`` for what is ``None``."""
        return cls(
            database_url or f"sqlite:///{folder / 'shop.sqlite'}",
            broker_url or "filesystem://",
            folder,
        )

    def as_environment(self) -> dict[str, str]:
        """The variables from which another process reads the same settings."""
        return {
            DATABASE: self.database_url,
            BROKER: self.broker_url,
            FOLDER: str(self.folder),
        }

    @property
    def broker_folder(self) -> Path:
        """Where the filesystem broker keeps its messages."""
        return self.folder / "broker"

    @property
    def needs_no_broker(self) -> bool:
        """Whether the messages are files."""
        return self.broker_url.startswith("filesystem")
