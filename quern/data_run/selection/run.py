"""Selects documents of a data run by importance weights, from the beginning or from where it was left.

Passes: features of the target and of the run are counted, documents are weighed, the first ones are drawn, the table is
written. What passes leave stands in ``RUN/measures/<name>/.work`` until the manifest is written, the last of all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from quern import storage
from quern.config import show
from quern.data_pipeline.dedup.rows import made_of
from quern.data_pipeline.execution.engine import Engine, InProcess, open_engine
from quern.data_pipeline.execution.fence import Fence
from quern.data_pipeline.execution.run_directory import remove_torn, sole_driver
from quern.data_run.selection.passes import CHOSEN, COUNTS, candidates, count_table, count_target, weigh, write_part
from quern.data_run.selection.pool import Pool, open_pool, place, place_tasks
from quern.data_run.selection.targets import TargetFile, open_targets
from quern.errors import InputError, QuernError
from quern.mixtures.importance.draw import Draw
from quern.mixtures.importance.weights import SMOOTHING, effective_size, log_ratio
from quern.tokenize.selection.measures import (
    FORMAT,
    MANIFEST,
    PART,
    SCRATCH,
    check_name,
    checked_parts,
    folder,
    part,
    read_manifest,
)

__all__ = ["Selection", "select"]


@dataclass(frozen=True)
class Selection:
    """What is asked for; one of ``keep_documents`` and ``keep_tokens``."""

    run: str
    name: str
    targets: tuple[str, ...]
    keep_documents: int | None = None
    keep_tokens: int | None = None
    """At most, counted as in training: with one EOT a document."""
    seed: int = 0
    sources: tuple[str, ...] = ()
    """None: all of the run."""
    num_buckets: int = 10_000
    min_words: int = 100
    """Documents with fewer words are weighed, and not chosen."""
    text_field: str = "text"
    """Of targets in JSON lines and Parquet."""


def select(
    asked: Selection,
    workers: int | None = None,
    address: str | None = None,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> dict[str, Any]:
    """Write the table of a selection, and return its manifest; of one that stands already too.

    ``workers``: processes of a Ray cluster, at ``address`` or started here (None: one a CPU); 1 without an address:
    this process, without Ray.

    Raises:
        InputError: the run, a target or an option is not what is needed; or the name has another selection.
        QuernError: another process is at work in the run.
    """
    root = folder(asked.run, check_name(asked.name))
    if not asked.targets or (asked.keep_documents is None) is (asked.keep_tokens is None):
        raise InputError("expected --target, and one of --keep-documents and --keep-tokens")
    runs = [path for path in asked.targets if storage.is_file(storage.join(path, "run.json"))]
    pool, like = open_pool(asked.run, asked.sources), sorted(map(open_pool, runs), key=lambda own: _version(own.record))
    if twice := [own.run for own, other in pairwise(like) if _version(own.record) == _version(other.record)]:
        raise InputError(f"--target: expected each data run once, got {twice[0]} twice")
    files = open_targets([path for path in asked.targets if path not in runs], asked.text_field)
    parameters = _parameters(asked, pool, like, files)
    if storage.is_file(storage.join(root, MANIFEST)):  # then the run need not be one that can be written
        return _standing(asked, root, parameters)
    with ExitStack() as stack:
        try:
            stack.enter_context(sole_driver(asked.run))
        except InputError as error:
            raise InputError(str(error).removeprefix("run_dir: ")) from None
        if open_pool(asked.run, asked.sources) != pool:
            raise QuernError(f"{asked.run}: has changed while it was looked at; start again")
        if storage.is_file(storage.join(root, MANIFEST)):
            return _standing(asked, root, parameters)
        tasks = [[partition.name, [file.path for file in partition.files]] for _, partition in files]
        scratch = _scratch(root, {**{name: parameters[name] for name in parameters if name != "keep"}, "tasks": tasks})
        # also without Ray: workers of a killed driver may live
        fence = Fence.claim(storage.join(scratch, "driver.json"))
        engine: Engine = InProcess()
        if workers != 1 or address is not None:
            engine = stack.enter_context(open_engine(workers, address, fence))
        sums = _passes(asked, pool, like, files, _Scratch(scratch, engine, tell))
        for own in like:
            if open_pool(own.run) != own:
                raise QuernError(f"{own.run}: has changed while it was read; start again")
        storage.write_json(storage.join(root, MANIFEST), manifest := {**parameters, **sums})
        storage.remove_tree(scratch)
        return manifest


def _parameters(asked: Selection, pool: Pool, like: Sequence[Pool], files: Sequence[TargetFile]) -> dict[str, Any]:
    """All that decides the table's bytes."""
    paths = [file.path for _, partition in files for file in partition.files]
    targets = [own.record for own in like] + [{"path": path, "sha256": storage.sha256(path)} for path in paths]
    keep = {"documents": asked.keep_documents} if asked.keep_tokens is None else {"tokens": asked.keep_tokens}
    return {
        "format": FORMAT, "corpus": {name: value for name, value in pool.record.items() if name != "path"},
        "sources": list(pool.spans), "targets": sorted(targets, key=lambda own: (str(own["sha256"]), str(own["path"]))),
        "text_field": asked.text_field, "min_words": asked.min_words, "seed": asked.seed, "keep": keep,
        "buckets": asked.num_buckets,
        "n_grams": "unigrams and bigrams of word_punct words in lower case, SHA-256",
        "smoothing": SMOOTHING,
    }  # fmt: skip


def _standing(asked: Selection, root: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a table that is complete, if it is the one that is asked for and has its bytes."""
    path = storage.join(root, MANIFEST)
    manifest = read_manifest(asked.run, asked.name)
    for name, here in parameters.items():
        there = manifest.get(name)
        if name == "targets" and there is not None:  # where they lie decides nothing
            there, here = ([own.get("sha256") for own in value] for value in (there, here))
        if there != here:
            told = f"{name} is {show(there)} there and {show(here)} here"
            raise InputError(f"{path}: holds another selection: {told}; give another --name")
    checked_parts(asked.run, asked.name)
    with suppress(OSError):
        storage.remove_tree(storage.join(root, ".work"))
    return manifest


def _version(record: Mapping[str, Any]) -> tuple[str, str]:
    """Which corpus version of which run a pool is, wherever it lies."""
    return str(record["sha256"]), str(record["run_id"])


def _scratch(root: str, key: Mapping[str, Any]) -> str:
    """The folder of passes, without what another selection left there that was not finished.

    Raises:
        InputError: files stand there that no selection writes.
    """
    scratch = storage.join(root, ".work")
    path = storage.join(scratch, "parameters.json")
    begun = storage.is_file(path)
    if not begun or storage.read_json(path) != key:
        ours = re.compile(f"{SCRATCH}|{PART}" if begun else SCRATCH)
        start, there = len(storage.split(root)[1]) + 1, storage.list_files(root)
        if foreign := [file for file in there if not ours.fullmatch(storage.split(file)[1][start:])]:
            raise InputError(f"{root}: has {foreign[0]}, which is of no selection; remove it, or give another --name")
        for file in there:  # parts first: without the folder of passes they would be of no selection
            if file.endswith(".parquet"):
                storage.remove(file)
        storage.remove_tree(root)
        storage.write_json(path, key)
    remove_torn(root)
    return scratch


@dataclass(frozen=True)
class _Scratch:
    """The folder of passes, and what runs them."""

    folder: str
    engine: Engine
    tell: Callable[[str], None]

    def files(self, name: str, number: int) -> list[str]:
        """The files of a pass."""
        return [storage.join(self.folder, name, f"{index:06d}") for index in range(number)]

    def run(self, label: str, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> None:
        """Run each task whose file or files, its last argument, are not all there."""
        there = {storage.split(file)[1] for file in storage.list_files(self.folder)}
        written = [[task[-1]] if isinstance(task[-1], str) else task[-1] for task in tasks]
        whole = [there.issuperset(storage.split(file)[1] for file in files) for files in written]
        left = [task for task, done in zip(tasks, whole, strict=True) if not done]
        self.tell(f"{label}: {len(left):,} of {len(tasks):,} tasks left")
        for _ in self.engine.map(function, left, label=f"selection: {label}"):
            pass

    def count(self, label: str, pool: Pool, num_buckets: int) -> tuple[list[str], list[str]]:
        """Files of which documents of a pool are read, and of their features."""
        placed, counts = (self.files(f"{kind}-{label}", len(pool.texts)) for kind in ("placed", "counts"))
        self.run(f"documents of {label}", place, place_tasks(pool, placed))
        each = zip(pool.texts, placed, counts, strict=True)
        tasks = [(table, lengths, num_buckets, file) for (_, table, _), lengths, file in each]
        self.run(f"features of {label}", count_table, tasks)
        return placed, counts


def _passes(
    asked: Selection, pool: Pool, like: Sequence[Pool], files: Sequence[TargetFile], scratch: _Scratch
) -> dict[str, Any]:
    """Write the table; what the manifest says of it."""
    counts = scratch.files("counts-target", len(files))
    tasks = [(own, asked.num_buckets, file) for own, file in zip(files, counts, strict=True)]
    scratch.run("features of the target", count_target, tasks)
    for number, other in enumerate(like):
        counts += scratch.count(f"target-{number}", other, asked.num_buckets)[1]
    placed, of_raw = scratch.count("run", pool, asked.num_buckets)
    target, raw = (
        sum((np.frombuffer(storage.read_bytes(file), np.int64) for file in own), np.zeros(asked.num_buckets, np.int64))
        for own in (counts, of_raw)
    )
    ratio = storage.join(scratch.folder, "log_ratio")
    if not storage.is_file(ratio):
        storage.publish_bytes(ratio, log_ratio(target, raw).tobytes())
    weighed, chosen = (scratch.files(name, len(pool.texts)) for name in ("weighed", "chosen"))
    each = zip(pool.texts, placed, weighed, strict=True)
    how = (ratio, asked.seed, asked.min_words)
    scratch.run("weights", weigh, [(table, lengths, *how, file) for (_, table, _), lengths, file in each])
    _draw(asked, weighed, chosen)
    parts = [part(asked.run, asked.name, number) for number in range(len(chosen))]
    done = dict(scratch.engine.map(write_part, [*zip(weighed, chosen, parts, strict=True)], label="selection: table"))
    written = [done[number] for number in range(len(parts))]
    return {
        **{name: sum(own[name] for own in written) for name in COUNTS},
        "effective_size": effective_size(sums for own in written for sums in own["sums"]),
        "features": int(raw.sum()),
        "target_features": int(target.sum()),
        "parts": [
            {"table": "/".join(table.split("/")[-2:]), "rows": own["documents"], "sha256": own["sha256"]}
            for (_, table, _), own in zip(pool.texts, written, strict=True)
        ],
    }


def _draw(asked: Selection, weighed: Sequence[str], files: Sequence[str]) -> None:
    """Write which documents of each partition are chosen, with their ranks."""
    by_tokens = asked.keep_documents is None
    name, most = ("tokens", asked.keep_tokens) if by_tokens else ("documents", asked.keep_documents)
    draw, there = Draw(most or 0, by_tokens=by_tokens), 0
    for number, file in enumerate(weighed):
        for found in candidates(file, number):
            there += int(found["tokens"].sum()) if by_tokens else len(found)
            draw.add(found)
    if (most or 0) > there:
        what = f"what documents of {asked.min_words:,} words and more have"
        raise InputError(f"--keep-{name}: expected at most {there:,}, {what}, got {most:,}")
    first = draw.first()
    if not len(first):
        raise InputError(f"--keep-tokens: expected more: the first document alone has more than {asked.keep_tokens:,}")
    by_row = np.lexsort((first["row"], first["part"]))
    edges = np.searchsorted(first["part"][by_row], np.arange(len(files) + 1))
    for number, file in enumerate(files):
        ranks = by_row[edges[number] : edges[number + 1]]
        storage.publish_bytes(file, made_of(CHOSEN, row=first["row"][ranks], rank=ranks).tobytes())
