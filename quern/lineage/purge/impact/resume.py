"""The exact command that continues a training run on the corpus version after a purge."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from quern import storage
from quern.config import parse_overrides
from quern.errors import InputError, QuernError
from quern.lineage.exposure import Clean
from quern.lineage.selection import select
from quern.lineage.store import IndexedRun
from quern.lineage.training import SeenCheckpoint, TrainingRun
from quern.tokenize.selection.chosen import Identity, family_of
from quern.train.checkpoint.format.manifest import CONFIG_FILE, Manifest, read_manifest
from quern.train.config import TrainConfig
from quern.train.history.ledger import MOVES, data_step, surviving

__all__ = ["VersionChange", "resume"]


@dataclass(frozen=True)
class VersionChange:
    """What a trainer must know of the corpus version that a purge makes."""

    version: int
    mode: Literal["mask", "rewrite"]
    streams: frozenset[str]
    """Names of those with shards that are written again."""


def resume(
    run: TrainingRun, lineages: Sequence[IndexedRun], verdict: Clean, tainted: bool, change: VersionChange | None,
    data_run: str, doc_ids: bytes, first: int | None,
) -> dict[str, Any]:  # fmt: skip
    """``command`` (None: ``why_not`` says why), its ``arguments``, ``step`` (of the checkpoint it goes back to; None:
    it goes on from the newest, or begins anew in ``run_dir``), ``run_in`` (the folder that its relative paths are
    meant from; None: it has none) and ``notes``.

    ``lineages``: the data run, as the training run finds it. ``tainted``: whether the present weights took anything in,
    or may have; if not, the run just goes on. ``data_run``: the one that is purged of ``doc_ids``.
    ``first``: the first step whose update had any of it.
    """
    answer: dict[str, Any] = {
        "command": None, "arguments": None, "step": None, "run_dir": None, "run_in": None, "notes": [], "why_not": None,
    }  # fmt: skip
    if run.of_other_trainer:
        known = "any number of" if first is None else f"at most {first:,}"
        return answer | {"why_not": f"another trainer has the weights; it loads a checkpoint after {known} steps, and "
                                    "gives quern.batches that number as start"}  # fmt: skip
    try:
        config = run.config
        arguments = _arguments(run, config, lineages, verdict, tainted, change, answer)
    except QuernError as error:
        return answer | {"why_not": str(error)}
    command = ["quern", "train", os.path.join(run.path, CONFIG_FILE), *arguments]
    keys = ["run_dir", *(f"data.{index}.path" for index in range(len(config.data)))]
    paths = [config.run_dir, *(given.path for given in config.data)]
    answer["notes"] += _unpurged(paths[1:], lineages, data_run, doc_ids)
    overridden = {argument.partition("=")[0] for argument in arguments}
    relative = [key for key, path in zip(keys, paths, strict=True) if not os.path.isabs(path) and key not in overridden]
    return answer | {
        "command": shlex.join(command), "arguments": command, "run_in": os.getcwd() if relative else None,
    }  # fmt: skip


def _arguments(
    run: TrainingRun, config: TrainConfig, lineages: Sequence[IndexedRun], verdict: Clean, tainted: bool,
    change: VersionChange | None, answer: dict[str, Any],
) -> list[str]:  # fmt: skip
    found, last = [], verdict.last
    if tainted and last is None and verdict.unknown:
        raise InputError("no checkpoint is known to be clean, since it is not known what the run read")
    if tainted and last is None:
        answer["run_dir"] = f"{run.path}-v{change.version}" if change is not None else f"{run.path}-clean"
        found += [_folder(answer["run_dir"]), *_forgotten(config)]
        answer["notes"].append("no checkpoint that is left is clean: the run begins anew, in a folder of its own")
        if config.checkpoint.store is not None:
            answer["notes"].append("checkpoint.store belongs to the old run: give the new one another")
    elif tainted:
        assert last is not None
        answer["step"] = last.step
        found += [*_same_folder(run, config), *_back(run, config, last, change, answer)]
    else:
        found += [*_same_folder(run, config), *_forgotten(config)]
    found += _data(run, config, lineages)
    if answer["run_dir"] is None:  # a run that begins anew has no past that another version could contradict
        found += _accepted(run, config, lineages, change)
    ranks = (run.attempts[-1].dp or 1) * config.parallel.tp * config.parallel.pp
    return [*found, "--nproc", str(ranks)] if ranks > 1 else found


def _same_folder(run: TrainingRun, config: TrainConfig) -> list[str]:
    """The run may have moved since, or its config may mean a folder below another one than we are in."""
    same = os.path.realpath(config.run_dir) == os.path.realpath(run.path)
    return [] if same else [_folder(run.path)]


def _data(run: TrainingRun, config: TrainConfig, lineages: Sequence[IndexedRun]) -> list[str]:
    """Sources that are not where the config says, seen from here, and are where the ledger says, or moved since."""
    now = {stream.identity.rpartition("/")[0]: stream.path for own in lineages for stream in own.streams}
    paths = run.attempts[-1].paths.items()
    families = [(Identity(ident).stream.rpartition("/")[0], path) for ident, path in paths]
    known = [path if os.path.isdir(path) else now.get(family, path) for family, path in families]
    told = {os.path.basename(path): path for path in known if os.path.isdir(path)}
    names = [os.path.basename(os.path.normpath(given.path)) for given in config.data]
    return [
        _folder(told[name], f"data.{index}.path")
        for index, (name, given) in enumerate(zip(names, config.data, strict=True))
        if not os.path.isdir(given.path) and name in told and _alone(name, [own.path for own in config.data])
    ]


def _folder(path: str, key: str = "run_dir") -> str:
    """The override that gives ``path``, quoted where YAML would take it for something else."""
    plain = f"{key}={path}"
    try:
        same = parse_overrides([plain])[0][1] == path
    except InputError:
        same = False
    return plain if same else f"{key}={json.dumps(path, ensure_ascii=False)}"


def _forgotten(config: TrainConfig) -> list[str]:
    """What takes a rollback that the config still asks for out of it."""
    found = [] if config.resume.step is None else ["resume.step=null"]
    found += [] if config.resume.again is None else ["resume.again=null"]
    return [*found, "data_skip=0"] if config.data_skip else found


def _back(
    run: TrainingRun, config: TrainConfig, last: SeenCheckpoint, change: VersionChange | None, answer: dict[str, Any]
) -> list[str]:
    skip = (
        data_step(run.entries, last.step) - _manifest(run, last).data_step
    )  # what the run skipped there, it skips again
    found = [f"resume.step={last.step}"]
    if skip != config.data_skip:
        found.append(f"data_skip={skip}")
    moves = [entry for entry in run.entries if entry["kind"] in MOVES]
    asked = {"step": last.step, "data_skip": skip}
    if config.resume.again is not None:
        asked["again"] = config.resume.again
    if moves[-1].get("asked") == asked:  # else it would be taken for the one that was done, and go on behind it
        known = [config.resume.again or 0, *([] if change is None else [change.version - 1])]
        found.append(f"resume.again={max(known) + 1}")
    for before, after in pairwise(surviving(run.entries, None)):
        if after.step > last.step and after.data_step > (before.data_stop or 0):
            answer["notes"].append(
                f"data steps {before.data_stop} to {after.data_step - 1}, which the run skipped later, are read again"
            )
    return found


def _manifest(run: TrainingRun, seen: SeenCheckpoint) -> Manifest:
    if os.path.isdir(seen.path):
        return read_manifest(seen.path)
    from quern.train.checkpoint.store.stored import store_of

    return store_of(run.path).manifest(seen.step)


def _accepted(
    run: TrainingRun, config: TrainConfig, lineages: Sequence[IndexedRun], change: VersionChange | None
) -> list[str]:
    """``data.I.accept_version=V`` for every source that is another than the run has read last."""
    found = []
    for index, given in enumerate(config.data):
        place = _place(given.path, [source.path for source in config.data], lineages)
        if place is None:
            continue
        lineage, name, identity = place
        version = lineage.version if change is None else change.version
        if change is not None and change.mode == "rewrite" and name in change.streams:
            identity = f"{lineage.run_id}/{name}/{change.version}"
        begins = f"{family_of(identity, given.where)}/"
        family = [known for known in run.order.ids if known.startswith(begins)]
        if family and Identity(family[-1]).stream != identity and given.accept_version != version:
            found.append(f"data.{index}.accept_version={version}")
    return found


def _unpurged(paths: Sequence[str], lineages: Sequence[IndexedRun], run: str, doc_ids: bytes) -> Iterator[str]:
    """A note for every source of which the command would read another copy, which still has the documents."""
    own = os.path.abspath(storage.split(run)[1]) if storage.is_local(run) else None
    for index, path in enumerate(paths):
        place = _place(path, paths, lineages)
        if place is None or (own is not None and os.path.samefile(place[0].run, own)):
            continue
        lineage, name, _ = place
        spans = select(lineage, lineage.find_docs(doc_ids))
        if name in {lineage.streams[number].name for number in np.unique(spans.streams[spans.purged_since == 0])}:
            override = "" if own is None else _folder(f"{own}/tokens/{name}", f"data.{index}.path")
            yield (
                f"it reads {lineage.run}/tokens/{name}, which is still version {lineage.version} and has the "
                f"documents: bring the new version there first{override and f', or give {shlex.quote(override)}'}"
            )


def _alone(name: str, paths: Sequence[str]) -> bool:
    """Whether one path of these has the name."""
    return sum(os.path.basename(path) == name for path in set(map(os.path.normpath, paths))) == 1


def _place(path: str, paths: Sequence[str], lineages: Sequence[IndexedRun]) -> tuple[IndexedRun, str, str] | None:
    """Data run, name and identity of the stream that an entry of ``data`` means: by its folder, or, where that is not
    there, by a name that no other entry has."""
    name = os.path.basename(os.path.normpath(path))
    for lineage in lineages:
        for stream in lineage.streams:
            same = os.path.realpath(stream.path) == os.path.realpath(path)
            if same or (stream.name == name and _alone(name, paths) and not os.path.exists(path)):
                return lineage, stream.name, stream.identity
    return None
