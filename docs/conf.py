"""Sphinx configuration. Nothing here needs a network."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "celery-outbox"
author = "celery-outbox contributors"
copyright = "celery-outbox contributors"
version = release = version_of("celery-outbox")

extensions = ["outbox_docs"]
exclude_patterns = ["_build"]
# A reference that leads nowhere is a mistake.
nitpicky = True

html_theme = "alabaster"
html_theme_options = {
    "description": "Celery jobs, recorded in your transaction",
    "page_width": "65em",
}
html_show_sourcelink = False
html_copy_source = False
