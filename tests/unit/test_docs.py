from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from celery import Celery, Task

from celery_outbox import Outbox, OutboxTask, exceptions
from celery_outbox.config import Config
from celery_outbox.core.classification import PERMANENT_TYPES
from celery_outbox.core.reasons import Reason
from celery_outbox.core.states import FINAL_STATES, TRANSITIONS
from celery_outbox.store.journal import Event
from tests.integration import differences
from tests.processes import REPOSITORY, Processes
from tests.wait import eventually

README = REPOSITORY / "README.rst"
DOCS = REPOSITORY / "docs"
HOWTO = sorted(path for path in (DOCS / "howto").glob("*.rst") if path.name != "index.rst")
HOWTO.append(DOCS / "migrating.rst")
PAGES = [
    README,
    REPOSITORY / "CHANGELOG.rst",
    *sorted(path for path in DOCS.rglob("*.rst") if "_build" not in path.parts),
]

EXAMPLE = (
    "python3 -m venv .venv && .venv/bin/pip install -q -e '.[demo]'"
    " && .venv/bin/python -m example_project"
)
TESTS = "python3 -m venv .venv && .venv/bin/pip install -q tox && .venv/bin/tox"


@dataclass(frozen=True)
class Block:
    """A literal block of a page; ``line`` is the number of its first line, from 0."""

    language: str
    line: int
    text: str
    caption: str | None = None


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the code blocks of a page, and the code in comments that start with "hidden-code"."""
    lines = page.read_text(encoding="utf-8").splitlines()
    found = []
    for index, line in enumerate(lines):
        match = re.fullmatch(r"\.\. (?:code-block:: (\w+)|(hidden-code))", line)
        if not match:
            continue
        start = index + 1
        caption = None
        while start < len(lines) and (not lines[start].strip() or lines[start].startswith("   :")):
            option = re.fullmatch(r"   :caption: (.+)", lines[start])
            caption = option.group(1) if option else caption
            start += 1
        end = start
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith("   ")):
            end += 1
        text = textwrap.dedent("\n".join(lines[start:end])).strip("\n") + "\n"
        found.append(Block(match.group(1) or "hidden", start, text, caption))
    return [block for block in found if not languages or block.language in languages]


def name(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def run(code: str, folder: Path) -> None:
    """Run code as a program of its own, as a reader would."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def reference():
    """Return the module that writes the reference pages."""
    path = DOCS / "_ext" / "reference_text.py"
    spec = spec_from_file_location("reference_text", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# -- README.rst ------------------------------------------------------------------------


def test_the_readme_is_short_and_has_the_two_commands():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    assert [block.text.strip() for block in blocks(README, "sh") if "venv" in block.text] == [
        EXAMPLE,
        TESTS,
    ]
    assert f".. test-command\n.. code-block:: sh\n\n    {TESTS}\n" in text


def test_the_links_and_files_that_the_readme_names_are_there():
    text = README.read_text(encoding="utf-8")
    links = re.findall(r"<(\S+\.rst)>`_", text)
    sources = re.findall(r"``((?:\w+/)?\w+\.py)``", text)
    assert links
    assert sources
    missing = [link for link in links if not (REPOSITORY / link).is_file()]
    missing += [file for file in sources if not (REPOSITORY / "celery_outbox" / file).is_file()]
    assert missing == []


def test_the_code_of_the_readme_records_a_job(tmp_path: Path):
    swap, call = blocks(README, "python")
    assert len([line for line in swap.text.splitlines() if line]) == 5
    given = """
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
class Base(DeclarativeBase): ...
class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
outbox.init()
Base.metadata.create_all(outbox.engine)
Session, order = sessionmaker(outbox.engine), Order()
"""
    checks = """
job = outbox.job("export-42")
assert (job.state, job.max_attempts, job.published_at) == ("queued", 3, None), job
with Session() as session:
    assert session.query(Order).count() == 1
"""
    run(swap.text + given + call.text + checks, tmp_path)


# -- code on the pages -----------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_python_block_compiles(page: Path):
    for block in blocks(page, "python", "hidden"):
        compile("\n" * block.line + block.text, name(page), "exec")


@pytest.mark.parametrize("page", HOWTO, ids=name)
def test_the_code_of_a_howto_page_runs_from_top_to_bottom(page: Path, tmp_path: Path):
    # Each block stands at its own line, so that an error names the line of the page.
    lines = [""] * (len(page.read_text(encoding="utf-8").splitlines()) + 1)
    for block in blocks(page, "python", "hidden"):
        for offset, line in enumerate(block.text.splitlines()):
            lines[block.line + offset] = line
    (tmp_path / page.with_suffix(".py").name).write_text("\n".join(lines), encoding="utf-8")
    run(
        "import runpy, sys; sys.path.insert(0, '.');"
        f"runpy.run_path({page.with_suffix('.py').name!r}, run_name='page')",
        tmp_path,
    )


def timeless(text: str) -> str:
    """Return ``text`` with another time in the place of each."""
    return re.sub(r"\d{4}-\d\d-\d\dT[\d:.+]+", "TIME", text)


@pytest.mark.slow
def test_the_quickstart_works_command_by_command(processes: Processes, tmp_path: Path):
    page = DOCS / "quickstart.rst"
    for block in blocks(page, "python"):
        if block.caption is not None:
            (tmp_path / block.caption).write_text(block.text, encoding="utf-8")

    def status() -> dict:
        asked = processes.celery("shop", "outbox", "status", "export-42", "--json", name="asked")
        assert asked.wait() == 0, asked.log()
        return json.loads(asked.log())

    commands = [line for block in blocks(page, "sh") for line in block.text.splitlines()]
    daemons = []
    for command in commands:
        program, *arguments = command.split()
        if program == "python":
            process = processes.python(*arguments)
        else:
            assert program == "celery"
            process = processes.python("-m", "celery", *arguments)
        if arguments[-1] in ("dispatch", "worker"):
            daemons.append(process)
            continue
        if daemons:
            eventually(lambda: status()["state"] == "succeeded", deadline=60, interval=0.5)
        assert process.wait() == 0, process.log()
        if arguments[-2:] == ["status", "export-42"] and not daemons:
            shown = next(block.text for block in blocks(page, "text") if "state " in block.text)
            assert timeless(process.log()).strip() == timeless(shown).strip()
            assert status()["state"] == "queued"

    assert len(daemons) == 2
    assert (tmp_path / "results" / "reports" / "export-42.csv").read_text() == (
        "account,period\n42,2026-01\n"
    )
    for daemon in reversed(daemons):
        assert daemon.terminate() == 0, daemon.tail()


# -- what the pages say of the code ----------------------------------------------------


def test_the_table_of_transitions_is_the_one_in_the_code():
    text = (DOCS / "concepts.rst").read_text(encoding="utf-8")
    rows = re.findall(
        r"^   \* - ``(\w+)``\n     - ``(\w+)``\n     - (.+)\n     - ``(\w+)``\n     - \S",
        text,
        re.M,
    )
    documented = {
        (step, event, frozenset(re.findall(r"\w+", before)), after)
        for step, event, before, after in rows
    }
    coded = {
        (
            step.name.lower(),
            str(step),
            frozenset("new" if state is None else str(state) for state in before),
            str(after),
        )
        for step, (before, after) in TRANSITIONS.items()
    }
    assert documented == coded
    assert len(rows) == len(coded)


def test_the_final_states_are_named():
    text = (DOCS / "concepts.rst").read_text(encoding="utf-8")
    sentence = re.search(r"\n\n((?:``\w+``(?:,| and)\s)*``\w+``) are final:", text)
    assert sentence is not None
    assert set(re.findall(r"\w+", sentence.group(1).replace(" and", ""))) == set(
        map(str, FINAL_STATES)
    )


def test_every_quarantine_reason_has_a_row_for_the_operator():
    text = (DOCS / "operations.rst").read_text(encoding="utf-8")
    table = text[text.index("* - reason") :]
    rows = re.findall(r"^   \* - ``(\w+)``$", table, re.M)
    assert sorted(rows) == sorted(str(reason) for reason in Reason)


def test_every_journal_line_that_is_no_transition_is_explained():
    text = (DOCS / "concepts.rst").read_text(encoding="utf-8")
    start = text.index("The journal has a few more lines")
    explained = set(re.findall(r"``(\w+)`` \(", text[start : text.index("\n\n", start)]))
    meant = Event.__doc__ or ""
    meant = meant[meant.index("transition, or") : meant.index("state:")]
    assert explained == set(re.findall(r"``(\w+)``", meant))


def test_every_error_of_a_call_is_explained():
    text = (DOCS / "howto" / "sessions.rst").read_text(encoding="utf-8")
    explained = re.findall(r"^``(\w+)``$", text[text.index("Errors at the call") :], re.M)
    kinds = {kind.__name__ for kind in exceptions.RecordError.__subclasses__()}
    assert set(explained) == kinds


def test_every_decision_has_a_place_in_the_index():
    index = (DOCS / "decisions" / "index.rst").read_text(encoding="utf-8")
    pages = sorted(page.stem for page in (DOCS / "decisions").glob("[0-9]*.rst"))
    assert re.findall(r"^   (\d\d-\S+)$", index, re.M) == pages


def test_the_log_events_and_outbox_attributes_that_the_pages_name_exist():
    package = REPOSITORY / "celery_outbox"
    source = "\n".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py"))
    wrong = []
    for page in PAGES:
        for word in re.findall(r"``outbox\.(\w+)[^`]*``", page.read_text(encoding="utf-8")):
            if f'"outbox.{word}"' not in source and not hasattr(Outbox, word):
                wrong.append((name(page), word))
    assert wrong == []


def test_every_permanent_error_class_is_named():
    text = (DOCS / "howto" / "errors.rst").read_text(encoding="utf-8")
    assert [kind.__name__ for kind in PERMANENT_TYPES if f"``{kind.__name__}``" not in text] == []


def test_the_settings_page_has_every_field_with_its_default():
    text = reference().settings_page()
    entries = re.findall(
        r"^\.\. confval:: (\w+)\n   :type: ``(.+)``\n   :default: ``(.+)``\n\n   (.+)$", text, re.M
    )
    assert [(setting, kind, default) for setting, kind, default, _ in entries] == [
        (f"outbox_{field.name}", field.type, repr(field.default)) for field in fields(Config)
    ]
    docstring = " ".join((Config.__doc__ or "").split()).lower()
    assert [setting for setting, _, _, says in entries if says.lower() not in docstring] == []
    assert ".. outbox-settings::" in (DOCS / "reference" / "settings.rst").read_text()


def test_the_settings_and_commands_that_the_pages_name_exist():
    settings = {f"outbox_{field.name}" for field in fields(Config)}
    commands = {path for path, _ in reference().commands()}
    wrong = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        named = re.findall(r":confval:`(\w+)`", text) + re.findall(r"\.conf\.(outbox_\w+)", text)
        wrong += [(name(page), word) for word in named if word not in settings]
        for words in re.findall(r"celery -A \w+ (outbox(?: (?!app\b)[a-z]+)+)", text):
            if not any(f"{words} ".startswith(f"{command} ") for command in commands):
                wrong.append((name(page), words))
    assert wrong == []


def test_the_commands_page_has_every_command_with_its_options():
    text = reference().commands_page()
    for path, command in reference().commands():
        assert f".. describe:: {path}" in text
        for param in command.params:
            if param.param_type_name == "option":
                assert f"``{max(param.opts, key=len)}" in text
        # cli.rst says it of all of them.
        assert any("--json" in param.opts for param in command.params), path
    assert ".. outbox-commands::" in (DOCS / "reference" / "cli.rst").read_text()


def test_the_migrating_page_has_every_option_of_a_call_and_of_a_task():
    text = (DOCS / "migrating.rst").read_text(encoding="utf-8")

    def rows(name: str) -> set[str]:
        """What is in the first column of a table."""
        table = re.search(rf"^\.\. {name}\n\n(.+?)\n\n(?=\S+ )", text, re.M | re.S)
        assert table is not None
        cells = re.findall(r"^   \* - (.+(?:\n       .+)*)", table.group(1), re.M)
        return set(re.findall(r"``(\w+)``", " ".join(cells)))

    call = {
        *inspect.signature(Task.apply_async).parameters,
        *inspect.signature(OutboxTask.apply_async).parameters,
        *inspect.signature(Celery.send_task).parameters,
        # What Celery's documentation names beside them.
        *("queue", "exchange", "routing_key", "priority", "serializer", "compression"),
        *("headers", "retry", "retry_policy", "delivery_mode", "ignore_result"),
    }
    assert call - {"self", "name", "options"} - rows("call-options") == set()
    task = {
        option
        for kind in (Task, OutboxTask)
        for option, value in vars(kind).items()
        if not option.startswith("_") and not callable(value) and not hasattr(value, "__get__")
    }
    assert task - {"abstract", "from_config", "request_stack"} - rows("task-options") == set()


def test_the_reference_names_every_difference_of_a_message():
    text = (DOCS / "reference" / "messages.rst").read_text()
    differs = {*differences.NOT_SENT, *differences.CHANGED, *differences.REDACTED}
    differs |= {*differences.PROPERTIES_NOT_SENT, *differences.REQUEST_DIFFERS}
    assert {name for name in differs if f"``{name}``" not in text} == set()
    assert f"``{differences.BODY.decode()}``" in text
