"""Makes the helpers beside these tests importable: pytest's importlib mode leaves ``sys.path`` alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
