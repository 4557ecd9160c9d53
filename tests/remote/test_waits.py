"""Clocks on the work stand still while a store is waited for."""

from __future__ import annotations

from quern.remote.waits import around_waits, waiting


def test_each_outermost_wait_is_told_once() -> None:
    told: list[str] = []
    with waiting():
        pass
    with around_waits(lambda: told.append("waits"), lambda: told.append("works")):
        with waiting(), waiting():
            assert told == ["waits"]
        assert told == ["waits", "works"]
        with waiting():
            pass
    with waiting():
        pass
    assert told == ["waits", "works"] * 2
