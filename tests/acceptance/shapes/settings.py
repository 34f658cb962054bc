"""What is configured for all of them: broker, results, and where the outbox is."""

from __future__ import annotations

import os

BROKER = os.environ["SHAPE_BROKER"]
RESULTS = os.environ["SHAPE_RESULTS"]
DATABASE = os.environ["SHAPE_DATABASE"]
