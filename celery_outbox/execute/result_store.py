"""Where results with a ``result_key`` become durable: the protocol, and files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from celery_outbox.core.result_key import check_key
from celery_outbox.exceptions import ConfigurationError


@runtime_checkable
class ResultStore(Protocol):
    """Keeps one value per key, for good: the first write wins."""

    def exists(self, key: str) -> bool:
        """Whether a complete value is durable under ``key``."""

    def write(self, key: str, data: bytes | str | Iterable[bytes]) -> bool:
        """Make ``data`` durable under ``key``, all of it or nothing.

        Arguments:
            key: a relative path.
            data: bytes, text (stored as UTF-8), or chunks of bytes, which are streamed.

        Returns:
            Whether this call wrote it; ``False``: a value is there and stays as it is.

        Raises:
            InvalidStoreKey: the key cannot be used.
        """

    def read(self, key: str) -> bytes:
        """The value under ``key``.

        Raises:
            KeyError: there is none.
        """


class FileStore:
    """Results as files below one folder.

    A value is written to a temporary file, flushed to the disk, and linked under its name in one
    step, which fails if the name exists; then the folder is flushed. A reader sees the whole
    value or none, also after a power failure (POSIX: ``link`` is atomic and does not overwrite).

    Arguments:
        root: the folder; made when the first value is written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    def path(self, key: str) -> Path:
        """The file of ``key``."""
        return self.root / check_key(key)

    def exists(self, key: str) -> bool:
        """Whether the file is there."""
        return self.path(key).is_file()

    def write(self, key: str, data: bytes | str | Iterable[bytes]) -> bool:
        """Write the file unless it exists; see :meth:`ResultStore.write`."""
        path = self.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
        try:
            with temporary.open("xb") as file:
                for chunk in _chunks(data):
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                if path.is_file():
                    return False
                raise
            self._flush_folders(path.parent)
            return True
        finally:
            temporary.unlink(missing_ok=True)

    def read(self, key: str) -> bytes:
        """The file's content; see :meth:`ResultStore.read`."""
        try:
            return self.path(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def _flush_folders(self, folder: Path) -> None:
        """Flush the entries of the new file and of the folders that were made for it."""
        for each in (folder, *folder.parents):
            handle = os.open(each, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
            if each == self.root.parent:
                break


def open_store(url: str) -> ResultStore:
    """The result store that a ``outbox_result_store`` setting names.

    Raises:
        ConfigurationError: the URL names no store.
    """
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return FileStore(unquote(parts.path))
    raise ConfigurationError(
        setting="outbox_result_store",
        problem="it is not the URL of a result store",
        remedy="Example: file:///var/lib/shop/results",
    )


def _chunks(data: bytes | str | Iterable[bytes]) -> Iterable[bytes]:
    if isinstance(data, str):
        return (data.encode("utf-8"),)
    if isinstance(data, (bytes, bytearray, memoryview)):
        return (bytes(data),)
    return data
