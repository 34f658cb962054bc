"""Writes reference pages out of the code itself, as reStructuredText.

Free of Sphinx, so that the tests can read what the pages say.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import click

from celery_outbox.config import PREFIX, Config
from celery_outbox.operate.cli import outbox

#: A field in the docstring of Config: its name, a colon, text that may go on further in.
_FIELD = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


@dataclass(frozen=True)
class Setting:
    """One field of Config, as a user sets it."""

    name: str
    type: str
    default: Any
    text: str


def settings() -> list[Setting]:
    """Every field of Config, in its order.

    Raises:
        KeyError: a field is not described in Config's docstring.
    """
    texts = {
        name: " ".join(text.split())
        for name, text in _FIELD.findall(inspect.cleandoc(Config.__doc__ or ""))
    }
    return [
        Setting(PREFIX + field.name, str(field.type), field.default, texts[field.name])
        for field in fields(Config)
    ]


def settings_page() -> str:
    """The settings, each with its type, its default and what it does."""
    lines: list[str] = []
    for setting in settings():
        text = setting.text[0].upper() + setting.text[1:]
        lines += [
            f".. confval:: {setting.name}",
            f"   :type: ``{setting.type}``",
            f"   :default: ``{setting.default!r}``",
            "",
            f"   {text}",
            "",
        ]
    return "\n".join(lines)


def commands(group: click.Group = outbox, path: str = "outbox") -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it; a group's commands follow the group."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def commands_page() -> str:
    """The commands, each with its arguments, its help and its options."""
    lines: list[str] = []
    for path, command in commands():
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        options = [each for each in command.params if isinstance(each, click.Option)]
        words = [path]
        for argument in arguments:
            metavar = (argument.name or "").upper()
            words.append(f"{metavar}..." if argument.nargs == -1 else metavar)
        if options:
            words.append("[OPTIONS]")
        lines += [
            f".. describe:: {' '.join(words)}",
            "",
            f"   {' '.join((command.help or '').split())}",
            "",
        ]
        for option in options:
            lines += [f"   ``{_written(option)}``", f"      {_explained(option)}", ""]
    return "\n".join(lines)


def _written(option: click.Option) -> str:
    name = max(option.opts, key=len)
    if option.is_flag:
        return name
    if isinstance(option.type, click.Choice):
        return f"{name} {'|'.join(str(choice) for choice in option.type.choices)}"
    return f"{name} {option.metavar or option.type.name.upper()}"


def _explained(option: click.Option) -> str:
    if option.show_default:
        return f"{option.help} Default: ``{option.default}``."
    return option.help or ""
