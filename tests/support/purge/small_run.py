"""A small run of the real road in one process: texts, duplicates of every kind, signatures, tokens, stats, report."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quern import storage
from quern.data_pipeline import report
from quern.data_pipeline import run as pages
from quern.data_pipeline.execution.run_directory import open_run
from quern.data_pipeline.execution.tasks import InProcess
from quern.data_pipeline.monitoring.progress import RunProgress
from quern.data_run.config import DataRun
from quern.tokenize.writing import run as tokens

WORDS = ("river", "lantern", "harbour", "orchard", "mirror", "saddle", "copper", "window", "garden", "thunder")
SITES = ("a.example", "b.example", "c.example", "leak.example")
#: Of the near-duplicates: so many words of a text are another's.
CHANGED = 2


def write_input(folder: Path, documents: int = 96, files: int = 3) -> None:
    """Files of pages on four sites; every eighth text is another's, every twelfth nearly so, some URLs too."""
    folder.mkdir(parents=True)
    texts: list[str] = []
    rows: list[dict[str, Any]] = []
    for number in range(documents):
        draw = random.Random(number)
        text = " ".join(f"The {draw.choice(WORDS)} of {draw.choice(WORDS)} is {draw.random()}." for _ in range(24))
        if number % 8 == 7:
            text = texts[number // 2]
        elif number % 12 == 10:
            words = texts[number // 3].split()
            words[: 2 * CHANGED : 2] = ["Another"] * CHANGED
            text = " ".join(words)
        texts.append(text)
        page = number // 2 if number % 16 == 9 else number
        rows.append({"id": str(number), "url": f"https://{SITES[page % 4]}/{page}", "text": text})
    for part in range(files):
        lines = [json.dumps(row) for row in rows[part::files]]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")


def settings(run: str, inputs: Path, **more: Any) -> DataRun:
    """The config of a run over :func:`write_input`."""
    return DataRun.model_validate(
        {
            "run_dir": run,
            "sources": [{"name": "s", "kind": "jsonl", "paths": str(inputs / "*.jsonl")}],
            "language": {"keep": None, "threshold": 0, "pre_skip": False},
            "quality": {"order": []},
            "tokenize": {"encoding": "trained", "vocab_size": 300, "validation": 0.1, "shard_tokens": 6000},
            **more,
        }
    )


def make(config: DataRun) -> None:
    """The whole road, with its report."""
    partitions = pages.plan_sources(config)
    inputs = pages.inputs_identity(partitions)
    with open_run(config.run_dir, config.model_dump(mode="json"), inputs) as directory:
        with RunProgress(background=False) as progress:
            result = pages.run(config, partitions, InProcess(), progress)
        scratch = storage.join(directory.scratch, "tokens")
        made = tokens.run(config.run_dir, result.partitions, config.tokenize, config.seed, InProcess(), scratch)
        stats = report.build_stats(config.run_dir, result.duplicates, asdict(made)["sources"], result.partitions)
        report.write_stats(config.run_dir, stats)
        report.write_report(config.run_dir, stats, seed=config.seed, partitions=result.partitions)
        counts = {key: stats[key] for key in ("pages", "kept", "unique")}
        directory.finish(counts, pages.inputs_digest(partitions))
