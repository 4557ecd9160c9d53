"""What CI leaves out on a slow machine is skipped with its reason, and nothing else is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "told"), [(-1, "2 skipped"), (600, "2 passed")])
def test_tests_begin_before_the_time_or_not_at_all(tmp_path: Path, seconds: int, told: str) -> None:
    """Fixtures neither: one that fails would be an error."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_both.py").write_text(
        "import time, pytest\n"
        "@pytest.fixture\n"
        f"def late():\n    assert time.time() < {time.time() + seconds}\n"
        "def test_one(late): pass\n"
        "def test_two(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    done = subprocess.run(
        [*command, "-n", "2", "--dist", "loadfile", "--begin-before", str(time.time() + seconds), "."],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert told in done.stdout
    assert ("not begun: the time for tests was over" in done.stdout) == (seconds < 0)
