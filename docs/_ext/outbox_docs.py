"""Directives for pages that are written out of the code."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from reference_text import commands_page, settings_page
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Settings(SphinxDirective):
    """Every setting, out of ``celery_outbox.config.Config``."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(settings_page())


class Commands(SphinxDirective):
    """Every command, out of ``celery_outbox.operate.cli``."""

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(commands_page())


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("outbox-settings", Settings)
    app.add_directive("outbox-commands", Commands)
    return {"parallel_read_safe": True}
