"""Runs ``quern doctor`` for a config in a process beside each rank, so that what hangs there hangs no rank."""

from __future__ import annotations

import os
import subprocess
import tempfile

from quern.config import dump_yaml
from quern.errors import InputError
from quern.safe_path import module
from quern.train.config import TrainConfig
from quern.train.processes import launch, waiting

__all__ = ["preflight"]


def preflight(config: TrainConfig) -> None:
    """Check the machines of this start. Collective.

    Raises:
        InputError: something was found, or a machine could not be checked; it has been told on standard error. The
            same command would find it again.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(dump_yaml(config))
        file.flush()
        timeout = f"{config.preflight_timeout_s:g}"
        command = module("quern.cli.main", "doctor", file.name, "--device", config.device, "--timeout", timeout)
        seen = {**os.environ, **waiting.handed}  # not a GPU that has failed
        done = subprocess.run(command, pass_fds=launch.handed_on(), check=False, stdin=subprocess.DEVNULL, env=seen)
    if done.returncode:
        why = "has named machines" if done.returncode == 1 else "could not check the machines"
        raise InputError(f"preflight: quern doctor {why} (above), and nothing was started; repair or leave them out, "
                         "or start with preflight=false")  # fmt: skip
