"""What the demonstration prints."""

from __future__ import annotations

from collections.abc import Sequence

from example_project.play.look import Seen


def heading(text: str) -> None:
    """Begin a part."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def say(text: str) -> None:
    """One thing that happened."""
    print(f"  {text}", flush=True)


def show(when: str, seen: Seen) -> None:
    """What one look found."""
    published = f"{seen.published_at:%H:%M:%S} UTC" if seen.published_at else "never"
    reason = f", reason {seen.reason}" if seen.reason else ""
    say(f"{when}:")
    _line("database", f"job {seen.state}{reason}, attempt {seen.attempt} of {seen.max_attempts}")
    _line("", f"deliveries {seen.deliveries}, the body ran {_times(seen.runs)}")
    _line("", f"published {published}, outbox rows to publish: {seen.outbox_rows}")
    _list("journal", seen.journal)
    _line("broker", f"{_messages(seen.waiting)} in the queue, {seen.quarantined} in quarantine")
    _line("files", ", ".join(seen.files) or "none")


def _list(name: str, words: Sequence[str], width: int = 70) -> None:
    line = ""
    for word in words:
        if line and len(line) + len(word) > width:
            _line(name, line)
            name, line = "", ""
        line += word if not line else f" > {word}"
    _line(name, line)


def _line(name: str, text: str) -> None:
    print(f"    {name:<9} {text}", flush=True)


def _times(number: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(number, f"{number} times")


def _messages(number: int) -> str:
    return "1 message" if number == 1 else f"{number} messages"
