"""``python -m quern.train`` as a launcher starts it."""

from __future__ import annotations

import os
import subprocess

import pytest

from support.programs import python


@pytest.mark.parametrize("place", [{}, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}])
@pytest.mark.parametrize(
    ("arguments", "code", "said"), [(["--help"], 0, "usage: torchrun"), (["no.yaml"], 2, "no.yaml")]
)
def test_what_it_says_last_is_heard_and_its_code_survives(
    place: dict[str, str], arguments: list[str], code: int, said: str
) -> None:
    """A worker leaves without ending the interpreter: what stands in its buffers has to be out by then."""
    done = subprocess.run(
        [python(), "-m", "quern.train", *arguments],
        env={**os.environ, **place, "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert said in done.stdout + done.stderr
