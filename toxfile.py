"""Lets tox find the Pythons that pyenv has installed, activated or not.

pyenv's shims refuse every version that is not activated, and tox takes no for an answer.
"""

from __future__ import annotations

import os
from pathlib import Path

root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
# At the end: what is on PATH already keeps its precedence.
os.environ["PATH"] = os.pathsep.join(
    [os.environ["PATH"], *(str(path) for path in sorted(root.glob("versions/3.*/bin")))]
)
