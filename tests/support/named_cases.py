"""Many cases of one test function without a test each: all are tried, and those that fail are named together."""

from __future__ import annotations

import functools
import inspect
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


def with_each(*cases: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make one test of a function that takes a case: its positional parameters; those by name alone are fixtures."""

    def made(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tries_all(**fixtures: Any) -> None:
            each(cases, functools.partial(test, **fixtures))

        signature = inspect.signature(test)
        by_name = [own for own in signature.parameters.values() if own.kind is own.KEYWORD_ONLY]
        tries_all.__signature__ = signature.replace(parameters=by_name)  # type: ignore[attr-defined]
        return tries_all

    return made
