"""What tests do to files that are to be found damaged."""

from __future__ import annotations

import random
from pathlib import Path


def flip(path: str | Path, at: int | None = None, bit: int = 1) -> str:
    """Change a bit of a file, in its middle if nothing else is said; its path."""
    data = bytearray(Path(path).read_bytes())
    data[len(data) // 2 if at is None else at] ^= bit
    Path(path).write_bytes(data)
    return str(path)


def flip_any(path: str | Path, draw: random.Random) -> str:
    """Change a bit of a file that the draw picks; its path."""
    return flip(path, draw.randrange(Path(path).stat().st_size), 1 << draw.randrange(8))
