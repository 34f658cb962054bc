"""What users have for their own tests fits the code that it stops."""

from __future__ import annotations

from importlib import import_module

import pytest

from celery_outbox.testing import BOUNDARIES


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_every_boundary_is_at_functions_that_are_there(boundary):
    for target in BOUNDARIES[boundary].target.split():
        module, _, path = target.partition(":")
        found = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
        assert callable(found), target
