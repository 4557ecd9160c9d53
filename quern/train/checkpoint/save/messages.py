"""Messages between trainer and writer process: a pickle in base64 per line, since both are of one trainer.

``("lay_out", files)`` has no answer. ``("write", folder)`` and ``("publish", publication)`` are answered by
``("done", what it gave)`` or ``("failed", text)``.
"""

from __future__ import annotations

import base64
import pickle
from typing import Any

__all__ = ["from_line", "to_line"]


def to_line(kind: str, content: Any) -> str:
    """The line of a message, without its end."""
    return base64.b64encode(pickle.dumps((kind, content))).decode()


def from_line(line: str | bytes) -> tuple[str, Any]:
    """The inverse.

    Raises:
        ValueError: the line is no message.
    """
    data = base64.b64decode(line.strip(), validate=True)
    try:
        kind, content = pickle.loads(data)
    except Exception as error:
        raise ValueError(f"not a message ({type(error).__name__})") from error
    return kind, content
