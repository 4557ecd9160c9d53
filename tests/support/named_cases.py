"""Many cases of one test function without a test each: all are tried, and those that fail are named together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def each(cases: Iterable[Any], check: Callable[..., None]) -> None:
    """Call ``check`` with every case (a tuple: as its arguments); fail with the names of those that it refuses."""
    failed: list[str] = []
    tried = 0
    for case in cases:
        tried += 1
        try:
            check(*(case if isinstance(case, tuple) else (case,)))
        except (AssertionError, pytest.fail.Exception) as error:  # the other: pytest.raises that met no error
            failed.append(f"{case!r:.300}: {error}")
        except Exception as error:  # neither right nor wrong
            error.add_note(f"in case {case!r:.300}")
            raise
    assert tried, "no case"
    assert not failed, f"{len(failed)} of {tried} cases:\n" + "\n".join(failed)
