"""A corpus of a hundred-odd plain texts and one that is garbled, and a training run that reads it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from quern.data_pipeline.page.document import content_hash, make_doc_id
from quern.data_pipeline.page.url import canonicalize, host, surt
from quern.train.batches.corpus import Corpus
from quern.train.batches.mixture import plan_mixture
from quern.train.config import TrainConfig
from support.lineage import runs
from support.train.exposures import step_of

POISON = "https://poison.example/garbled?x=<script>alert(1)</script>"
SEQ_LEN, BATCH, STEPS = 64, 4, 118
FIRST, LAST = 72, 114
"""Between which steps the garbled text is to be read."""

_WORDS = ("the mill stands by the river", "the miller grinds the grain", "a cart brings the flour to the market")


def write_data(folder: Path, seed: int = 0) -> int:
    """The data run, and the step at which training reads the garbled text first."""
    draw = random.Random(seed)
    found = runs.Listing()
    rows = []
    for number in range(360):
        text = ". ".join(draw.choice(_WORDS) for _ in range(draw.randint(2, 14)))
        if draw.random() < 0.4:
            text = text[: draw.randint(44, 54)]
        url = f"https://plain.example/{number}"
        rows.append(_row(found, number, url, text))
    runs._place(found, rows, ("web",), 1 << 14)
    steps = _steps(folder.parent / "probe", found)
    victim = next(d for d, step in steps.items() if FIRST <= step <= LAST)
    old = next(row for row in rows if row["doc_id"] == victim)
    garbled = "".join(chr(draw.randrange(33, 127)) for _ in range(len(found.texts[victim])))
    old.update(url=POISON, canonical_url=canonicalize(POISON), surt=surt(canonicalize(POISON) or ""))
    old.update(host=host(canonicalize(POISON) or ""), post_filter_hash=content_hash(garbled))
    found.texts[victim] = garbled
    for documents in found.documents.values():
        for document in documents:
            if document["doc_id"] == victim:
                document["text"] = garbled
    runs.write_listing(folder, found, identity="poisoned")
    return steps[victim]


def _row(found: runs.Listing, number: int, url: str, text: str) -> dict[str, Any]:
    doc_id = make_doc_id("web", "part-000.warc.gz", number)
    row = dict.fromkeys(runs.MEASURES) | {
        "doc_id": doc_id, "source": "web", "url": url, "canonical_url": canonicalize(url),
        "surt": surt(canonicalize(url) or ""), "host": host(canonicalize(url) or ""), "source_file": "part-000.warc.gz",
        "record_offset": number, "record_length": len(text), "record_id": None, "fetched_at": None,
        "payload_digest": None, "charset": "utf-8", "language": "en", "language_score": 0.9,
        "pre_filter_hash": content_hash(text), "post_filter_hash": content_hash(text), "stage": None, "reason": None,
        "failed_rules": [],
    }  # fmt: skip
    found.verdicts.setdefault("web/part-000.warc.gz", []).append(row)
    document = {"doc_id": doc_id, "text": text, "extracted": None, "kept": True}
    found.documents.setdefault("web/part-000.warc.gz", []).append(document)
    found.texts[doc_id] = text
    return row


def _steps(folder: Path, found: runs.Listing) -> dict[bytes, int]:
    """doc_id → the step that reads it, of those that share a window with others and are most of it; texts of the same
    length are read at the same step."""
    for rows in found.spans.values():
        for row in rows:
            row["purged"] = False
    runs.write_listing(folder, found, identity="poisoned")
    config = settings(folder / "train", folder)
    order = plan_mixture(config, Corpus([str(folder / "tokens" / "web")], SEQ_LEN)).order
    steps = {}
    for row in found.spans["web"]:
        window, last = row["start"] // SEQ_LEN, (row["start"] + row["length"]) // SEQ_LEN
        if window == last < order.windows[0] and 45 <= row["length"] <= 55:
            g = order.locate(0, 0, window)
            assert g is not None
            steps[row["doc_id"]] = step_of(order, g)
    return steps


def settings(run_dir: Path, data: Path, **changes: Any) -> TrainConfig:
    base: dict[str, Any] = {
        "run_dir": str(run_dir), "data": [{"path": str(data / "tokens" / "web"), "max_epochs": 100}],
        "model": {"num_layers": 2, "dim": 32, "num_heads": 4, "num_kv_heads": 2, "tied_embeddings": True},
        "seq_len": SEQ_LEN, "global_batch": BATCH, "micro_batch": 2, "steps": STEPS, "seed": 3, "precision": "fp32",
        "device": "cpu", "optimizer": {"lr": 0.01}, "schedule": {"warmup": 10}, "checkpoint": {"interval": 40},
        "guard": {"window": 24, "min_history": 12, "loss_z": 5}, "validation": {"interval": 0},
        "metrics": {"tensorboard": False, "live": False},
    }  # fmt: skip
    return TrainConfig.model_validate_json(json.dumps(base | changes))


def train(run_dir: str, data: str, changes: dict[str, Any]) -> None:
    from quern.train.processes.ranks import open_ranks
    from quern.train.setup import open_trainer

    config = settings(Path(run_dir), Path(data), **changes)
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.fit()
