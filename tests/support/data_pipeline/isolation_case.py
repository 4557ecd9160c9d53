"""A small run whose pages can be made bad, and what became of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quern.data_pipeline import run as pages
from quern.data_pipeline.config import PipelineConfig
from quern.data_pipeline.execution.engine import Engine, InProcess
from quern.data_pipeline.monitoring.progress import RunProgress

WORDS = "the quick brown fox jumps over a lazy dog and that have with to of be while rivers run down into valleys"


def text(number: int) -> str:
    """A small page of its own words."""
    words = WORDS.split()
    lines = [
        " ".join(words[(number * 7 + line * 3 + i * (1 + line)) % len(words)] for i in range(12)) + f" {number} {line}."
        for line in range(9)
    ]
    return "\n".join(lines)


def write_source(folder: Path, num: int, special: dict[int, str]) -> str:
    path = folder / "in.jsonl"
    with path.open("w") as file:
        for number in range(num):
            body = text(number)
            if number in special:
                body += f"\nTRAP-{special[number]}-{folder}."
            file.write(json.dumps({"id": str(number), "text": body}) + "\n")
    return str(path)


def settings(folder: Path, source: str, **isolation: Any) -> PipelineConfig:
    return PipelineConfig.model_validate(
        {
            "run_dir": str(folder / "run"),
            "sources": [{"name": "s", "kind": "jsonl", "paths": source}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False},
            "quality": {"order": []},
            "isolation": {"page_timeout_s": 1.5, **isolation},
        }
    )


def run(config: PipelineConfig, engine: Engine | None = None) -> tuple[pages.PagesResult, int]:
    """What came of it, and how many errors it told of."""
    with RunProgress(background=False) as progress:
        result = pages.run(config, pages.plan_sources(config), engine or InProcess(), progress)
        return result, progress.snapshot()["errors"]["num"]


def verdicts(folder: Path) -> dict[str, tuple[str | None, str | None]]:
    return {row["record_id"]: (row["stage"], row["reason"]) for row in verdict_table(folder).to_pylist()}


def verdict_table(folder: Path) -> pa.Table:
    (path,) = (folder / "run" / "verdicts").rglob("*.parquet")
    return pq.read_table(path)
