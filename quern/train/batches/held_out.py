"""The held-out documents of a run's sources, and the sets given beside them. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations

from quern import storage
from quern.errors import InputError
from quern.tokenize.shard_format import VERSION_FILE
from quern.tokenize.shards import ShardReader
from quern.train.batches.corpus import Corpus, NoWindowError, check_apart
from quern.train.batches.mixture import open_streams, source_names
from quern.train.config import TrainConfig

__all__ = ["held_out_names", "open_held_out"]

_HELD_OUT = ".val"
"""How the folder of a source's held-out documents ends, beside the source's own."""


def open_held_out(config: TrainConfig, *, keep: bool = False, known: str | None = None) -> tuple[Corpus, ...]:
    """Those of ``path + '.val'`` that the corpus version lists and that hold at least one window, of documents that
    fulfil the source's ``where``, and the sets of ``validation.sets``. ``keep``, ``known``: see :func:`open_corpus`.

    Raises:
        InputError: a file of theirs is missing or is not what the corpus version says; a set is of another encoding
            than the sources, is one of them, or has the name of one.
    """
    found = []
    for source in config.data:
        folder = source.path.rstrip("/") + _HELD_OUT
        root, name = os.path.split(os.path.abspath(folder))
        listed = storage.read_json(os.path.join(root, VERSION_FILE))["sources"]
        if name in listed and ShardReader(folder).num_windows(config.seq_len):
            with suppress(NoWindowError):
                found.append(open_streams(config, [(folder, source.where)], keep=keep, known=known))
    for one, other in combinations(found, 2):
        if one.readers[0].path == other.readers[0].path and one.chosen[0] and other.chosen[0]:
            check_apart(one.readers[0].path, (one.wheres[0], one.chosen[0]), (other.wheres[0], other.chosen[0]))
    sources = [(source.path, source.where) for source in config.data]
    for number, given in enumerate(config.validation.sets):
        where = f"validation.sets.{number}"
        if given.name in source_names(config):
            raise InputError(f"{where}.name: expected another than those of the sources of data, got {given.name!r}")
        try:
            open_streams(config, [*sources, (given.path, None)], keep=keep, known=known)
            found.append(Corpus([given.path], config.seq_len))
        except InputError as error:
            raise InputError(f"{where}.path: {error}") from None
    opened = [corpus.readers[0].path for corpus in found]
    sets = len(config.validation.sets)
    for twice in (path for place, path in enumerate(opened) if place >= len(opened) - sets and path in opened[:place]):
        raise InputError(f"validation.sets: {twice} is given twice, or is held out of a source; expected each set once")
    return tuple(found)


def held_out_names(config: TrainConfig, held_out: Sequence[Corpus]) -> list[tuple[str, bool]]:
    """Of each corpus of :func:`open_held_out`: the name of its source or set, and whether it is a set."""
    folders = [(os.path.abspath(given.path) + _HELD_OUT, given.where) for given in config.data]
    names = dict(zip(folders, source_names(config), strict=True))
    sets = {os.path.abspath(given.path): given.name for given in config.validation.sets}
    found = []
    for corpus in held_out:
        path = os.path.abspath(corpus.readers[0].path)
        found.append((sets.get(path) or names[path, corpus.wheres[0]], path in sets))
    return found
