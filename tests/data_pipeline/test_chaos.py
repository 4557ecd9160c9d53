"""Whatever is killed, and whenever: the tokens, the verdicts and the counters are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", ["driver", "worker", "machine", "store"])
def test_kills_change_no_byte_and_no_counter(kind: str, tmp_path: Path) -> None:
    import chaos

    report = chaos.chaos(kind, 2, seed=1, folder=tmp_path)
    assert report.differing == []
    assert report.struck >= 2
