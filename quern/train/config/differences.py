"""Tells in which keys two configs differ, a line a key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

__all__ = ["differing"]


def differing(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Each dotted key in which two configs, as plain data, differ, and its value in both as YAML on one line; but for
    ``run_dir``: the same run may stand at two paths. A key that one of them lacks counts as null."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*after, *before]):
            if name or key != "run_dir":
                yield from differing(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, pair in enumerate(zip(before, after, strict=True)):
            yield from differing(*pair, f"{name}.{place}")
    elif before != after:
        yield name, _plain(before), _plain(after)


def _plain(value: Any) -> str:
    dumped = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).removesuffix("...\n")
    text = " ".join(dumped.split())
    return text if len(text) <= 100 else text[:99].rsplit(" ", 1)[0] + " …"
