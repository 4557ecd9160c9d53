"""The held-out documents of a run's sources, and the sets given beside them. Imports no torch."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

from quern import storage
from quern.errors import InputError
from quern.tokenize.shard_format import VERSION_FILE
from quern.tokenize.shards import ShardReader
from quern.train.batches.corpus import Corpus, NoWindowError, check_apart
from quern.train.batches.mixture import open_streams, source_names
from quern.train.config import TrainConfig

__all__ = ["HeldOut", "open_held_out"]


@dataclass(frozen=True)
class HeldOut:
    """Held-out documents, under the name of their source or set."""

    name: str
    corpus: Corpus
    is_set: bool = False


def open_held_out(config: TrainConfig, *, keep: bool = False, known: str | None = None) -> tuple[HeldOut, ...]:
    """Those of ``path + '.val'`` that the corpus version lists and that hold at least one window, of documents that
    fulfil the source's ``where``, and the sets of ``validation.sets``. ``keep``, ``known``: see :func:`open_corpus`.

    Raises:
        InputError: a file of theirs is missing or is not what the corpus version says; a set is of another encoding
            than the sources, is one of them, or has the name of one.
    """
    found, names = [], source_names(config)
    for source, name in zip(config.data, names, strict=True):
        folder = source.path.rstrip("/") + ".val"
        root, base = os.path.split(os.path.abspath(folder))
        listed = storage.read_json(os.path.join(root, VERSION_FILE))["sources"]
        if base in listed and ShardReader(folder).num_windows(config.seq_len):
            with suppress(NoWindowError):
                corpus = open_streams(config, [(folder, source.where)], keep=keep, known=known)
                found.append(HeldOut(name, corpus))
    for one, other in combinations([own.corpus for own in found], 2):
        if one.readers[0].path == other.readers[0].path and one.chosen[0] and other.chosen[0]:
            check_apart(one.readers[0].path, (one.wheres[0], one.chosen[0]), (other.wheres[0], other.chosen[0]))
    sources = [(source.path, source.where) for source in config.data]
    for number, given in enumerate(config.validation.sets):
        where = f"validation.sets.{number}"
        if given.name in names:
            raise InputError(f"{where}.name: expected another than those of the sources of data, got {given.name!r}")
        try:
            open_streams(config, [*sources, (given.path, None)], keep=keep, known=known)
            found.append(HeldOut(given.name, Corpus([given.path], config.seq_len), is_set=True))
        except InputError as error:
            raise InputError(f"{where}.path: {error}") from None
    opened = [own.corpus.readers[0].path for own in found]
    for twice in (path for place, path in enumerate(opened) if found[place].is_set and path in opened[:place]):
        raise InputError(f"validation.sets: {twice} is given twice, or is held out of a source; expected each set once")
    return tuple(found)
