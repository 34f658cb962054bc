from __future__ import annotations

from importlib.metadata import distribution

from tests.processes import REPOSITORY

PACKAGE = REPOSITORY / "celery_outbox"


def test_every_file_of_the_package_is_installed():
    installed = {str(file) for file in distribution("celery-outbox").files or ()}
    expected = {
        str(file.relative_to(REPOSITORY))
        for file in PACKAGE.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    editable = any(name.startswith("__editable__") for name in installed)
    assert editable or expected <= installed, sorted(expected - installed)


def test_celery_finds_the_outbox_commands():
    entry_points = distribution("celery-outbox").entry_points
    assert [(entry.group, entry.name) for entry in entry_points] == [("celery.commands", "outbox")]
