"""The whole data road in this process: what a run makes, without what Ray takes to start."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from quern.config import load_config
from quern.data_pipeline.execution.engine import InProcess
from quern.data_run import run
from quern.data_run.config import DataRun

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@contextmanager
def _alone(*_: Any) -> Iterator[InProcess]:
    yield InProcess()


@contextmanager
def engine() -> Iterator[None]:
    """What runs inside runs without Ray."""
    with mock.patch.object(run, "open_engine", _alone):
        yield


def run_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``stats.json`` of the run holds."""
    with engine():
        return run.run_resolved(DataRun.model_validate_json(json.dumps(config)))


def run_recipe(recipe: str, *overrides: str) -> dict[str, Any]:
    """As ``quern data run configs/RECIPE OVERRIDES``."""
    with engine():
        return run.run_resolved(load_config(str(CONFIGS / recipe), DataRun, overrides))
