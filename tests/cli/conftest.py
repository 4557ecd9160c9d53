"""Makes the data runs of the trainer's tests importable: pytest's importlib mode leaves ``sys.path`` alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "train"))
