"""The run that the recorder watches: three sources, six lives of a trainer, and a book of what went into which weights.

:func:`sample` and :func:`real` say what data, :func:`plan` which lives; :func:`train` lives them.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quern.demo import write_site
from quern.parallel.local import LocalRanks
from support.lineage import recorder

LENGTH, BATCH, MICRO_BATCH, DATA_SKIP = 64, 8, 2, 3


# ---- data

WORDS = [
    "mill", "stone", "river", "grain", "flour", "sack", "wheel", "water", "miller", "bread", "oven", "morning",
    "village", "road", "cart", "horse", "rain", "roof", "barn", "field", "harvest", "autumn", "winter",
    "spring", "market", "price", "letter", "bridge",
]  # fmt: skip


def write_texts(path: Path, documents: int, seed: int) -> str:
    """JSONL of sentences that never repeat for long."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(documents):
            words = [draw.choice(WORDS) + draw.choice(("", "", "s", " of", " and", ",")) for _ in range(_length(draw))]
            body = f"{number} {draw.getrandbits(40):x} {' '.join(words)}. Größe — 水車 {draw.random():.6f}"
            file.write(json.dumps({"id": f"{path.stem}/{number}", "text": body}) + "\n")
    return str(path)


def _length(draw: random.Random) -> int:
    return int(min(600, 2 + draw.expovariate(1 / 40)))


PLAIN = {"language": {"keep": None, "threshold": 0, "pre_skip": False}, "toxicity": {"action": "measure"}}


def data_config(run_dir: Path, warcs: Sequence[str], texts: Mapping[str, str], **changes: Any) -> dict[str, Any]:
    """Crawled pages and texts; nearly everything is kept."""
    pages = [{"name": "crawl", "kind": "warc", "paths": list(warcs)}]
    return {
        "run_dir": str(run_dir),
        "sources": pages + [{"name": name, "kind": "jsonl", "paths": path} for name, path in texts.items()],
        "quality": {"order": []},
        "pii": {"action": "mask"},
        **PLAIN,
        **changes,
    }


def sample(folder: Path) -> tuple[dict[str, Any], list[str], int]:
    site = write_site(str(folder / "site"), seed=3, pages=148)
    texts = {
        "notes": write_texts(folder / "notes.jsonl", 160, 1), "tales": write_texts(folder / "tales.jsonl", 24, 2),
    }  # fmt: skip
    tokens = {"encoding": "trained", "vocab_size": 400, "shard_tokens": 20_000, "validation": 0.05}
    warcs = [str(Path(path).resolve()) for path in site.warcs]
    return data_config(folder / "run", warcs, texts, tokenize=tokens), ["crawl", "tales", "notes"], 5


def real(folder: Path, shared: Path, **encoding: Any) -> tuple[dict[str, Any], list[str], int]:
    """``encoding``: keys of ``tokenize``."""
    warcs = sorted(str(path) for path in (shared / "data" / "warc").glob("*.warc.gz"))[:3]
    texts = {}
    for name, documents in (("papers", 400), ("wikipedia", 3)):
        texts[name] = str(folder / f"{name}.jsonl")
        with gzip.open(shared / "data" / "text" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
            Path(texts[name]).write_text("".join(file.readlines()[:documents]), encoding="utf-8")
    tokens = {**encoding, "shard_tokens": 100_000, "validation": 0.05}
    language = {"keep": ["en"], "threshold": 0.5}
    config = data_config(folder / "run", warcs, texts, tokenize=tokens, language=language)
    return config, ["crawl", "wikipedia", "papers"], 20


# ---- the lives


@dataclass(frozen=True)
class Life:
    """What a start of the trainer does."""

    start: int
    stop: int
    """The first step it does not complete: the one it is killed in, or the end."""
    world: int = 1
    every: int = 1
    """Steps between checkpoints."""
    skip: tuple[int, ...] = ()
    back: int | None = None
    """``resume.step``, beyond :data:`DATA_SKIP` data steps that are never read."""


def plan(u: int) -> tuple[Life, ...]:
    """Killed between checkpoints: steps are done again, one was skipped the first time, another is the second time.
    Rolled back, to two ranks with another cadence, and killed before the first checkpoint, so that one of the left
    branch stands and nothing of that life remains; killed again; to the end on one rank.
    """
    return (
        Life(0, 3 * u + 4, every=u, skip=(u + 1, 3 * u + 1)),
        Life(3 * u, 5 * u + 2, every=u, skip=(3 * u + 2, 4 * u + 1)),
        Life(4 * u, 4 * u + 3, 2, every=2 * u, skip=(4 * u + 1,), back=4 * u),
        Life(4 * u, 7 * u + 1, 2, every=2 * u, skip=(5 * u + 1,), back=4 * u),
        Life(6 * u, 9 * u + 1, 2, every=u, back=4 * u),
        Life(9 * u, 11 * u, every=u, skip=(10 * u,)),
    )


@dataclass
class Book:
    """Which (life, step) went into which weights, kept while the lives go by."""

    history: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: {0: []})
    """Checkpoint that stands → the steps its weights have been through; skipped ones too."""
    branch: list[tuple[int, int]] = field(default_factory=list)
    """Those of the newest life."""
    standing: set[int] = field(default_factory=set)
    _times: dict[int, int] = field(default_factory=dict)

    def lived(self, number: int, life: Life, checkpoints: Path) -> None:
        times = {int(path.name.removeprefix("step_")): path.stat().st_mtime_ns for path in checkpoints.glob("step_*")}
        self.branch = list(self.history[life.start])
        for step in range(life.start, life.stop):
            self.branch.append((number, step))
            if step + 1 in times and times[step + 1] != self._times.get(step + 1):
                self.history[step + 1] = list(self.branch)
        self._times, self.standing = times, set(times)

    def left(self, step: int) -> bool:
        """Whether the checkpoint is of a branch that was left."""
        own = self.history[step]
        return own != self.branch[: len(own)]

    def copy(self) -> Book:
        return Book(dict(self.history), list(self.branch), set(self.standing))


@dataclass(frozen=True)
class Moment:
    """A training run as it stood after some of its lives."""

    path: Path
    lives: tuple[Life, ...]
    book: Book


def train(folder: Path, run_dir: Path, sources: Sequence[tuple[str, str | None]], u: int) -> tuple[Moment, ...]:
    """All lives, recorded in ``folder/records``. The third source is silent in the first phase. ``sources``: names, and
    for each the condition on its documents."""
    (folder / "records").mkdir()
    path = folder / "train"
    base = {
        "run_dir": str(path),
        "data": [
            {"path": str(run_dir / "tokens" / name), "where": where, "weight": weight, "max_epochs": 1000}
            for (name, where), weight in zip(sources, (5, 2, 0), strict=True)
        ],
        "phases": [{"first_step": 6 * u - 1, "weights": [2, 1, 3], "global_batch": 2 * BATCH}],
        "model": {"num_layers": 1, "dim": 16, "num_heads": 2, "num_kv_heads": 1, "tied_embeddings": True,
                  "vocab_multiple": 64},
        "seq_len": LENGTH, "global_batch": BATCH, "micro_batch": MICRO_BATCH, "steps": 11 * u, "seed": 5,
        "precision": "fp32", "device": "cpu", "schedule": {"warmup": 3},
        "validation": {"interval": u, "windows": 3}, "metrics": {"tensorboard": False, "live": False},
        "forensics": {"window": 0},  # which shows the model a step that is not finite once more
    }  # fmt: skip
    book, moments = Book(), []
    with ExitStack() as stack:
        several: dict[int, LocalRanks] = {}
        for number, life in enumerate(plan(u)):
            config = base | {
                "parallel": {"dp_shard": life.world},
                "checkpoint": {"interval": life.every, "keep_last": 1000, "mode": "sync"},
                "resume": {"step": life.back},
                "data_skip": 0 if life.back is None else DATA_SKIP,
            }
            told = (json.dumps(config), str(folder / "records"), number, life.stop, list(life.skip))
            if life.world not in several:
                several[life.world] = stack.enter_context(LocalRanks(life.world, timeout_s=800))
            begun = several[life.world].call(recorder.live, *told)
            assert {step for _, step, _ in begun} == {life.start}
            book.lived(number, life, path / "checkpoints")
            if any(book.left(step) for step in book.standing):
                shutil.copytree(path, folder / f"train{number}")
                moments.append(Moment(folder / f"train{number}", plan(u)[: number + 1], book.copy()))
    assert len(moments) == 1  # the trainer tidies the left branch away with its next checkpoint
    return (*moments, Moment(path, plan(u), book))
