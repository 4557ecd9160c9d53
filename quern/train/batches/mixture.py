"""Builds the order of a run from its config and corpus: planned at the first start, extended at later ones.

On a resume the past is the ledger's and the future is the config's. A config that tells the past otherwise is refused:
recipes, batch sizes and corpus versions change only by opening a phase.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quern.errors import InputError
from quern.mixtures.order import Order, Phase
from quern.mixtures.recipe import MixtureSource, OrderPlan, plan_order
from quern.mixtures.word import quantise
from quern.tokenize.selection.chosen import CHOSEN
from quern.train.batches.corpus import AssumedCorpus, Corpus
from quern.train.config import TrainConfig
from quern.train.history.branch import LEDGER_FILE
from quern.train.history.ledger import latest_order, read_ledger

__all__ = [
    "Mixture",
    "budget",
    "carry_on",
    "data_section",
    "open_corpus",
    "open_streams",
    "order_names",
    "plan_mixture",
    "source_names",
    "sources_of",
    "with_sources",
]


@dataclass(frozen=True)
class Mixture:
    """An order, and which reader of the corpus gives each of its sources (None: a version that is no longer read)."""

    order: Order
    source_map: tuple[int | None, ...]


def open_corpus(config: TrainConfig, *, keep: bool, known: str | None = None) -> Corpus:
    """The sources of a config, as they are read in the run's folder. ``keep``: what conditions choose is written there;
    else it is only looked for there, and in the folder of the run ``known``."""
    given = [(source.path, source.where) for source in config.data]
    return open_streams(config, given, keep=keep, known=known)


def open_streams(
    config: TrainConfig, given: Sequence[tuple[str, str | None]], *, keep: bool, known: str | None = None
) -> Corpus:
    """:func:`open_corpus` of other streams than the config's: paths, and a condition for each or None."""
    paths, wheres = zip(*given, strict=True) if given else ((), ())
    own = os.path.join(config.run_dir, CHOSEN)
    if not any(wheres):
        return Corpus(paths, config.seq_len)
    ledger = os.path.join(config.run_dir if known is None else known, LEDGER_FILE)
    order = latest_order(read_ledger(ledger)) if os.path.exists(ledger) else None
    read = () if order is None else order.ids
    if keep:
        return Corpus(paths, config.seq_len, wheres, [own], read)
    others = [own] if known is None else [own, os.path.join(known, CHOSEN)]
    with tempfile.TemporaryDirectory(prefix="quern-chosen-") as folder:  # a file that is mapped stays readable
        return Corpus(paths, config.seq_len, wheres, [folder, *others], read)


def source_names(config: TrainConfig) -> list[str]:
    """The name of each entry of ``data``: that of its source, or its path if several paths have that name; with its
    condition if several entries have that path."""
    paths = [os.path.abspath(given.path) for given in config.data]
    names = [os.path.basename(path) for path in dict.fromkeys(paths)]
    return [
        (given.path if names.count(os.path.basename(path)) > 1 else os.path.basename(path))
        + (f" where {given.where}" if paths.count(path) > 1 else "")
        for path, given in zip(paths, config.data, strict=True)
    ]


def order_names(config: TrainConfig, mixture: Mixture) -> list[str]:
    """The name of each source of the order; of one that is not read any more, its identity."""
    names = source_names(config)
    owns = zip(mixture.source_map, mixture.order.ids, strict=True)
    return [ident if own is None else names[own] for own, ident in owns]


def sources_of(config: TrainConfig, corpus: Corpus | AssumedCorpus) -> list[MixtureSource]:
    """The sources of a config as a recipe needs them."""
    return [
        MixtureSource(name, ident, given.path, tokens, windows, given.weight, given.max_epochs)
        for given, name, ident, tokens, windows in zip(
            config.data, source_names(config), corpus.ids, corpus.tokens, corpus.windows, strict=True
        )
    ]


def plan_mixture(config: TrainConfig, corpus: Corpus | AssumedCorpus) -> OrderPlan:
    """Plan the order of a config over its corpus, and what its steps read.

    Raises:
        InputError: the plan repeats a source more often than its ``max_epochs``, or the recipe is wrong.
    """
    phases = [Phase(phase.start, phase.weights, phase.global_batch) for phase in config.phases]
    return plan_order(
        sources_of(config, corpus), phases,
        seed=config.seed, seq_len=config.seq_len, global_batch=config.global_batch, steps=config.steps,
    )  # fmt: skip


def with_sources(config: TrainConfig, key: str, values: Sequence[float]) -> TrainConfig:
    """A config whose sources have other values of a key."""
    data = [own.model_copy(update={key: value}) for own, value in zip(config.data, values, strict=True)]
    return config.model_copy(update={"data": tuple(data)})


def data_section(config: TrainConfig) -> dict[str, Any]:
    """The part of a YAML file that gives a config its sources."""
    return {"data": [own.model_dump(mode="json", exclude_none=True) for own in config.data]}


def budget(config: TrainConfig, corpus: Corpus, what: str) -> int:
    """How many samples the steps of a config read, whatever its weights and caps are.

    Raises:
        InputError: a phase has weights of its own, which would stay what they are; ``what`` names the config.
    """
    if any(phase.weights is not None for phase in config.phases):
        raise InputError(f"{what}: phases: expected none with weights of their own, which would stay what they are")
    ones = [1.0] * len(config.data)
    free = with_sources(with_sources(config, "weight", ones), "max_epochs", [math.inf] * len(ones))
    return plan_mixture(free, corpus).samples


def carry_on(config: TrainConfig, corpus: Corpus, previous: Order | None, data_step: int) -> Mixture:
    """Extend the order of a run that has read the data steps before ``data_step`` by ``previous``; None: of a new one.

    Raises:
        InputError: seed or seq_len differ; the config says otherwise of a past phase; a source has gone, or has another
            version than before and ``accept_version`` does not name it.
    """
    for name in ("seed", "seq_len") if previous is not None else ():
        if (then := getattr(previous, name)) != (now := getattr(config, name)):
            raise InputError(f"{name}: the run in {config.run_dir} began with {then}, got {now}; give another run_dir")
    if previous is None or data_step == 0:  # nothing has been read: there is no past to keep
        return Mixture(plan_mixture(config, corpus).order, tuple(range(len(corpus.ids))))
    place = _places(config, corpus, previous)
    _check_past(config, previous, place, data_step)
    windows = dict(zip(previous.ids, previous.windows, strict=True))
    for ident, count in zip(corpus.ids, corpus.windows, strict=True):
        windows.setdefault(ident, count)

    def spread(names: Sequence[str], weights: Sequence[float]) -> tuple[float, ...]:
        """A weight for each source of the new order."""
        given = dict(zip(names, weights, strict=True))
        return tuple(given.get(ident, 0) for ident in windows)

    past = [row for row in previous.phases if row.first_step < data_step]
    phases = [Phase(row.first_step, spread(previous.ids, row.weights), row.global_batch, row.block) for row in past[1:]]
    recipe, batch = _recipe_at(config, data_step)
    changed = not _same(spread(corpus.ids, recipe), spread(previous.ids, past[-1].weights))
    # a phase that changes nothing opens all the same: it has blocks of its own
    opens = any(phase.start == data_step for phase in config.phases)
    if opens or changed or past[-1].global_batch != batch:
        phases.append(Phase(data_step, spread(corpus.ids, recipe), batch))
    for phase in config.phases:
        if phase.start > data_step:
            recipe, batch = _recipe_at(config, phase.start)
            phases.append(Phase(phase.start, spread(corpus.ids, recipe), batch))
    try:
        order = Order(
            spread(previous.ids, past[0].weights), list(windows.values()), previous.seed, phases, ids=list(windows),
            seq_len=previous.seq_len, global_batch=past[0].global_batch, block=past[0].block,
        )  # fmt: skip
    except ValueError as error:
        raise InputError(str(error)) from None
    places = {ident: own for own, ident in enumerate(corpus.ids)}
    return Mixture(order, tuple(places.get(ident) for ident in windows))


def _places(config: TrainConfig, corpus: Corpus, previous: Order) -> list[list[int]]:
    """For each entry of ``data`` its sources in the order so far: one a version, the newest last."""
    found, families = [], [known.rsplit("/", 1)[0] for known in previous.ids]  # identities without their versions
    for given, ident, version in zip(config.data, corpus.ids, corpus.versions, strict=True):
        family = [index for index, known in enumerate(families) if known == ident.rsplit("/", 1)[0]]
        if family and previous.ids[family[-1]] != ident and given.accept_version != version:
            raise InputError(
                f"{given.path}: the corpus is at version {version} now, and its windows are not those the run began "
                f"with ({previous.ids[family[-1]]}); give accept_version={version} for this source to go on with it "
                f"from a new phase"
            )
        found.append(family)
    known = {index for family in found for index in family}
    for index, ident in enumerate(previous.ids):
        if index not in known and any(row.weights[index] for row in previous.phases):
            raise InputError(
                f"data: the run has read from source {ident}, which is not given any more; keep its entry with "
                f"weight as it was, and set it to 0 from a phase on"
            )
    return found


def _check_past(config: TrainConfig, previous: Order, place: list[list[int]], data_step: int) -> None:
    """Whether the config tells what was read as it was, at every data step where one of the two changes."""
    starts = {row.first_step for row in previous.phases} | {phase.start for phase in config.phases}
    for first_step in sorted(start for start in starts if start < data_step):
        row = [row for row in previous.phases if row.first_step <= first_step][-1]
        recipe, batch = _recipe_at(config, first_step)
        then = [sum(row.weights[index] for index in family) for family in place]
        if batch != row.global_batch:
            raise InputError(
                f"global_batch: the run read {row.global_batch} sequences a step from data step {first_step}, the "
                f"config says {batch}; a change needs phases with first_step {data_step} or later"
            )
        if not _same(recipe, then):
            raise InputError(
                f"data: the run's weights from data step {first_step} were {_shares(then)}, the config says "
                f"{_shares(recipe)}; a change needs phases with first_step {data_step} or later"
            )


def _recipe_at(config: TrainConfig, data_step: int) -> tuple[list[float], int]:
    """Weights, one an entry of ``data``, and global batch that the config gives for a data step."""
    recipe, batch = [source.weight for source in config.data], config.global_batch
    for phase in config.phases:
        if phase.start <= data_step:
            recipe = list(phase.weights) if phase.weights is not None else recipe
            batch = phase.global_batch or batch
    return recipe, batch


def _same(weights: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two recipes are one: the order knows them as integers."""
    return sum(others) > 0 and quantise(weights) == quantise(others)


def _shares(weights: Sequence[float]) -> str:
    total = sum(weights)
    return ", ".join(f"{weight / total:.4g}" for weight in weights)
