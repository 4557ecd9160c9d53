"""The cases of the parity matrix: layout, way of computing a step, computation. Only the last changes the result.

Sizes are as uneven as a layout allows. Data parallelism and pipelines take any size, so that nothing divides by the
number of ranks. Tensor parallelism needs heads, feed-forward width, padded vocabulary and sequence length in equal
parts; dim, vocabulary and what is left of a part for FSDP2 to deal out stay uneven.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quern.parallel.planning.schedules import SCHEDULES
from quern.parallel.planning.stages import num_stages
from quern.train.parity.layouts import CONTEXT, DEALT, LAYOUTS, Layout
from quern.train.parity.published import PUBLISHED
from quern.train.parity.sizes import CAPACITY, SIZES, split_sizes

__all__ = [
    "FACTORS",
    "STEPS",
    "VOCAB_SIZE",
    "Case",
    "Computation",
    "context",
    "covering",
    "everything",
    "float8",
    "in_pieces",
    "pairs",
    "product",
    "quick",
    "sparse",
    "special",
]

STEPS, VOCAB_SIZE, Z_LOSS = 3, 127, 0.3
#: Tokens of a sequence, a multiple of a block's width, so that a block holds the same tokens on every layout; the same
#: where a sequence is dealt out in chunks, of which each is one; and sequences of a step.
FLOAT8_LENGTH, FLOAT8_DEALT, FLOAT8_BATCH = 128, 512, 4


FACTORS: dict[str, tuple[Any, ...]] = {
    "layout": tuple(LAYOUTS),
    "schedule": (None, *SCHEDULES),
    "activation": ("none", "full", "selective"),
    "more": (False, True),
    "mask": (True, False),
    "tied": (False, True),
    "sizes": ("six", "norm", "slim"),
    "z_loss": (False, True),
}
"""What a case may be, of which not every combination is legal."""


@dataclass(frozen=True)
class Computation:
    """The computation of a case: equal ones have equal results on any layout."""

    model: tuple[tuple[str, Any], ...]
    """Fields of :class:`quern.model.config.ModelConfig`."""
    seq_len: int
    global_batch: int
    """Of the first step."""
    mask: bool
    z_loss: float
    skip: int | None
    ramp: bool
    float8: str | None = None
    """Recipe of the blocks' products."""
    micro_batch: int | None = None
    """Where it changes the result; None: the whole batch at once gives the same."""
    experts: str | None = None
    """Of :data:`.sizes.EXPERTS`."""

    def phases(self) -> list[dict[str, Any]]:
        """The phases as in the config."""
        if not self.ramp:
            return []
        return [
            {"first_step": 1, "global_batch": 2 * self.global_batch},
            {"first_step": 2, "weights": [0.2, 0.2, 0.6]},
        ]


@dataclass(frozen=True)
class Case:
    """A run of :data:`STEPS` steps."""

    layout: str
    activation: str = "none"
    more: bool = False
    """Micro-batches: 3 instead of 1; in a pipeline, more than stages instead of as many."""
    mask: bool = True
    tied: bool = False
    sizes: str = "six"
    z_loss: bool = False
    schedule: str | None = None
    """Of a pipeline."""
    skip: int | None = None
    """A step with one gradient that is not a number."""
    ramp: bool = False
    """Twice the batch from step 1 on, another recipe from step 2 on."""
    float8: str | None = None
    """Recipe of the blocks' products; with sizes of its own (``blocks``), the same on every layout."""
    gather: bool = False
    """FSDP2 gathers weights in FP8."""
    pieces: int = 1
    """In how many of them tensor parallelism gathers and scatters."""
    experts: str | None = None
    """Of :data:`.sizes.EXPERTS`: what layers have in place of one feed-forward network."""

    def __str__(self) -> str:
        parts = [self.place, self.activation, f"x{self.accumulate}", "mask" if self.mask else "whole"]
        parts += ["tied" if self.tied else "untied", self.sizes]
        parts += ["z"] if self.z_loss else []
        parts += ["ramp"] if self.ramp else []
        parts += [self.float8] if self.float8 else []
        parts += ["gather"] if self.gather else []
        parts += [self.experts] if self.experts else []
        parts += [f"pieces{self.pieces}"] if self.pieces > 1 else []
        return "-".join(parts if self.skip is None else [*parts, f"skip{self.skip}"])

    @property
    def splits_backward(self) -> bool:
        return self.schedule is not None and SCHEDULES[self.schedule].splits_backward

    @property
    def place(self) -> str:
        """The layout, with the schedule of a pipeline."""
        return self.layout if self.schedule is None else f"{self.layout}-{self.schedule}"

    @property
    def on(self) -> Layout:
        return (LAYOUTS | CONTEXT | DEALT)[self.layout]

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages; 1 without a pipeline."""
        return 1 if self.schedule is None else num_stages(self.schedule, self.on.pp)

    @property
    def accumulate(self) -> int:
        """Micro-batches of a data-parallel rank in the first step."""
        if self.float8 is not None:
            one_by_one = self.more or self.on.pp > 1 or self.computation.micro_batch is not None
            return self.computation.global_batch // self.on.dp if one_by_one else 1
        if self.schedule is None:
            return self.computation.global_batch // self.on.dp if self.experts in CAPACITY else 3 if self.more else 1
        if not self.more:
            return self.num_stages
        # schedules with several stages a rank go in rounds of pp
        return self.num_stages + (self.on.pp if self.num_stages > self.on.pp else self.on.pp // 2 + 1)

    @property
    def computation(self) -> Computation:
        if self.float8 is not None:
            model = {**SIZES["blocks"], "vocab_multiple": 10, "tied_embeddings": self.tied}
            # a scale of all tokens, of whole rows along them, or of those that a call gives an expert: with ep those of
            # as many sequences, of a rank each, one after the other where all cost the same
            own = None if (self.float8, self.experts) == ("blockwise", None) else self.on.ep
            length, batch = FLOAT8_LENGTH, FLOAT8_BATCH
            if self.on.cp > 1:
                length, batch = FLOAT8_DEALT, 2 * self.on.pp
            return Computation(
                tuple(model.items()), length, batch, self.mask, 0.0, None, False, self.float8, own, self.experts
            )
        layout = self.on
        model = dict(SIZES[self.sizes], vocab_multiple=8)
        if layout.splits_heads > 1:
            model |= split_sizes(self.sizes, layout.splits_heads)
        if layout.tp > 1:  # rows of the vocabulary that no further rank divides
            model["vocab_multiple"] = 10 if layout.tp == 2 else 12
        if self.schedule is not None:
            model["num_layers"] = self.num_stages + (self.sizes != "slim")
        if layout.pp > 1:
            unit = layout.dp * self.accumulate
            batch = unit * (1 if self.experts in CAPACITY else max(1, 12 // unit))
        else:  # with 1 micro-batch and with 3
            unit = 3 * layout.dp
            batch = unit * -(-12 // unit)
        return Computation(
            tuple({**model, "tied_embeddings": self.tied}.items()),
            24 if layout.cp > 1 else 17 if layout.tp == 1 else 20,
            batch,
            self.mask,
            Z_LOSS if self.z_loss else 0.0,
            self.skip,
            self.ramp,
            micro_batch=1 if self.experts in CAPACITY else None,
            experts=self.experts,
        )

    @property
    def micro_batch(self) -> int:
        return self.computation.global_batch // self.on.dp // self.accumulate


def legal(case: Case) -> bool:
    """Whether a combination is legal: a schedule needs a pipeline, and a split backward excludes recomputation."""
    if case.schedule is None or case.on.pp == 1:
        return case.schedule is None and case.on.pp == 1
    return case.activation == "none" or not case.splits_backward


@cache
def product() -> list[Case]:
    """Every legal combination of factors."""
    cases = (Case(**dict(zip(FACTORS, row, strict=True))) for row in itertools.product(*FACTORS.values()))
    return [case for case in cases if legal(case)]


@cache
def everything() -> list[Case]:
    """The full legal product but for sizes and z-loss, which take turns."""
    names = [name for name in FACTORS if name not in ("sizes", "z_loss")]
    rows = (dict(zip(names, row, strict=True)) for row in itertools.product(*(FACTORS[name] for name in names)))
    plain = [row for row in rows if legal(Case(**row))]
    sizes = FACTORS["sizes"]
    cases = [
        Case(**row, sizes=sizes[number % len(sizes)], z_loss=number % 5 in (1, 3)) for number, row in enumerate(plain)
    ]
    return list(dict.fromkeys([*cases, *special(), *in_pieces(), *context(), *float8(), *sparse()]))


def special() -> list[Case]:
    """Steps that are skipped, and batches that grow, on one layout of each kind."""
    found = []
    for layout, schedule in (
        ("alone", None), ("ddp2", None), ("fsdp2", None), ("hsdp2x2", None), ("tp2", None), ("fsdp2tp2", None),
        ("pp2", "1f1b"), ("pp2", "zbv_zero_bubble"), ("pp4", "interleaved_1f1b"), ("pp2fsdp2", "gpipe"),
        ("pp2fsdp2tp2", "1f1b"),
    ):  # fmt: skip
        found.append(Case(layout, schedule=schedule, more=True, tied=True, sizes="norm", skip=1))
        found.append(Case(layout, schedule=schedule, z_loss=True, ramp=True))
    return found


def in_pieces() -> list[Case]:
    """Tensor parallelism whose messages travel in pieces, with each other axis."""
    return [
        Case("tp2", more=True, z_loss=True, pieces=2), Case("tp4", "full", sizes="norm", pieces=5),
        Case("fsdp2tp2", "selective", tied=True, pieces=5), Case("ddp2tp2", mask=False, sizes="slim", pieces=2),
        Case("pp2tp2", schedule="zbv_zero_bubble", tied=True, pieces=2),
    ]  # fmt: skip


def context() -> list[Case]:
    """Each way to deal tokens out, with each other axis, schedule and kind of step."""
    return [
        Case("ulysses2", more=True, z_loss=True), Case("ulysses2keep", "full", mask=False, sizes="norm"),
        Case("ulysses2fsdp2", "selective", more=True, tied=True, sizes="slim"), Case("ulysses2hsdp2", skip=1),
        Case("ulysses2tp2", tied=True, sizes="norm", z_loss=True), Case("ulysses2pp2", more=True, schedule="1f1b"),
        Case("ulysses2pp2", "selective", mask=False, schedule="interleaved_1f1b"),
        Case("gather2", more=True, tied=True, z_loss=True), Case("gather2keep", "selective", sizes="norm"),
        Case("gather2fsdp2", "full", more=True, mask=False, sizes="slim"), Case("gather2hsdp2", tied=True, skip=1),
        Case("gather2tp2", "selective", more=True, sizes="norm"), Case("gather2pp2", "full", schedule="gpipe"),
        Case("gather2pp2", more=True, tied=True, schedule="zbv_zero_bubble"), Case("gather4", ramp=True),
        Case("gather2pp2tp2", sizes="norm", schedule="1f1b"),
        Case("ring2", more=True, sizes="norm"), Case("ring2fsdp2", "selective", tied=True, z_loss=True),
        Case("ring2hsdp2", "full", more=True, mask=False), Case("ring2tp2", mask=False, sizes="slim"),
        Case("ring2pp2", tied=True, schedule="1f1b"), Case("ring3", "selective", ramp=True),
        Case("ring3", "full", tied=True, sizes="slim", skip=1), Case("ring2pp2", more=True, schedule="zbv_zero_bubble"),
        Case("usp2x2", more=True, tied=True, sizes="norm"), Case("usp2x2tp2", "full", z_loss=True),
        Case("usp2x2hsdp2", "selective", mask=False), Case("usp2x2pp2", schedule="interleaved_1f1b"),
    ]  # fmt: skip


def sparse() -> list[Case]:
    """Models with experts on layouts of each kind."""
    return [
        Case("fsdp2", "full", more=True, experts="bias", tied=True), Case("tp2", experts="loss", more=True),
        Case("pp2", experts="global", schedule="zbv_zero_bubble"),
        Case("alone", experts="loss", more=True), Case("alone", "full", experts="global"),
        Case("ddp2", experts="loss", more=True), Case("ddp3", experts="bias", skip=1),
        Case("fsdp2", "selective", experts="capacity"),
        Case("fsdp2zero1", more=True, experts="global"), Case("fsdp4", "selective", experts="global", ramp=True),
        Case("hsdp2x2", "full", more=True, experts="bias", sizes="norm"),
        Case("pp2", experts="bias", schedule="1f1b", more=True), Case("pp2", experts="loss", schedule="gpipe"),
        Case("pp2fsdp2", "full", experts="bias", schedule="interleaved_1f1b"),
        Case("tp2", "full", experts="bias", sizes="norm", pieces=2),
        Case("fsdp2tp2", "selective", experts="global", more=True), Case("pp2tp2", experts="bias", schedule="1f1b"),
        Case("ulysses2", experts="bias"), Case("gather2fsdp2", "full", experts="loss", more=True),
        Case("ring2", "selective", experts="global"), Case("usp2x2tp2", experts="loss"),
        Case("ep2", experts="eight", more=True), Case("ep2keep", "full", experts="places"),
        Case("ep4", "selective", experts="empty", more=True, tied=True), Case("ep8", experts="eight", sizes="norm"),
        Case("ep4node2", "full", experts="eight", more=True), Case("ep8node4", experts="empty"),
        Case("ep2fsdp2", "full", experts="places"), Case("ep2fsdp2zero1", more=True, experts="eight", skip=1),
        Case("ep2fsdp3", experts="empty", ramp=True), Case("ep2hsdp2", "selective", experts="eight"),
        Case("ep2hsdp2x2", experts="empty", more=True), Case("ep2tp2", "full", experts="eight", more=True),
        Case("ep2fsdp2tp2", experts="empty"), Case("ep2pp2", experts="eight", schedule="1f1b", more=True),
        Case("ep2pp2", experts="places", schedule="gpipe"), Case("ep2pp2", experts="empty", schedule="zbv_zero_bubble"),
        Case("ep2pp2", "full", experts="eight", schedule="interleaved_1f1b"),
        Case("ep2pp2", experts="eight", schedule="dualpipe_v"), Case("ep2pp2tp2", experts="eight", schedule="1f1b"),
        Case("ep2ulysses2", experts="eight"), Case("ep4ring2", "selective", experts="empty"),
        Case("ep2gather2fsdp2", "full", experts="eight", more=True), Case("ep2fsdp2", experts="bias", more=True),
        Case("ep2fsdp2", "selective", experts="bias", sizes="norm"),
        *(
            replace(case, sizes="blocks", float8="blockwise", experts="wide")
            for case in (
                Case("alone", "full", mask=False), Case("fsdp2", "selective", tied=True), Case("tp2", "full"),
                Case("pp2", schedule="1f1b"), Case("fsdp2tp2", mask=False), Case("pp2", schedule="zbv_zero_bubble"),
            )
        ),
        *(
            replace(case, mask=False, sizes="blocks", float8="blockwise", experts="broad")
            for case in (Case("ep2", "full"), Case("ep2fsdp2", "selective"), Case("ep2tp2"))
        ),
    ]  # fmt: skip


def float8() -> list[Case]:
    """FP8 on layouts of each kind. What several ranks of ``tp`` make of ``tensorwise`` and ``rowwise`` is not what one
    makes, for each has scales of its own.

    Judged like all others: sums in another order move a value by 1e-15 of itself, and of the 1e7 values that a run
    rounds to FP8 one crosses a tie with a chance of about 1e-7 at first, and 1e-5 once weights differ by 1e-13.
    """
    blocks = [
        Case("fsdp2", "selective", gather=True), Case("tp2", "selective"), Case("pp2", schedule="1f1b"),
        Case("pp2", schedule="zbv_zero_bubble"), Case("fsdp4keep", "full", gather=True), Case("fsdp4"),
        Case("hsdp2x2", gather=True), Case("fsdp2tp2", "full", gather=True), Case("pp2fsdp2", schedule="1f1b"),
        Case("pp2tp2", "selective", schedule="1f1b"), Case("pp2tp2", schedule="zbv_zero_bubble"),
        Case("tp2", "full", pieces=2),
        Case("ulysses2"), Case("gather2fsdp2", "full", gather=True), Case("gather2tp2", "selective"), Case("ring2"),
        Case("gather2pp2", schedule="zbv_zero_bubble"), Case("usp2x2", "selective"),
    ]  # fmt: skip
    rows = [Case("fsdp2"), Case("ddp2", "full"), Case("pp2", "selective", schedule="1f1b")]
    whole = [Case("fsdp2", "full", gather=True), Case("ddp2"), Case("pp2", schedule="zbv_zero_bubble")]
    by_recipe = {"blockwise": blocks, "rowwise": rows, "tensorwise": whole}
    return [replace(case, sizes="blocks", float8=recipe) for recipe, cases in by_recipe.items() for case in cases]


@cache
def quick() -> list[Case]:
    """Every layout, every schedule on two ranks and on four, with either number of micro-batches, and every two values
    of the other factors together: each at least once."""

    def seen(case: Case) -> Iterable[Hashable]:
        yield (
            case.layout if case.more or case.on.zero is None else None
        )  # which differ in what is between micro-batches
        yield case.schedule, case.on.pp if case.on.tp == case.on.dp == 1 else None
        yield case.schedule, case.more
        yield from pairs(case, [name for name in FACTORS if name not in ("layout", "schedule")])

    def cost(case: Case) -> float:
        """Less than in proportion to the processor time of its ranks, or none but the cheapest would be chosen."""
        passes = case.num_stages // case.on.pp * case.accumulate
        return math.sqrt(case.on.world * (4 + passes * (2 if case.on.tp > 1 else 1)))

    cases = [case for case in product() if case.layout != "alone" or case.more or case.activation != "none"]
    few = [case for case in special() if case.layout in ("fsdp2", "tp2", "pp2") or str(case) in PUBLISHED]
    few += [case for case in float8() if case.float8 == "blockwise" and case.on.world == 2][:2]
    few += in_pieces()[:1]
    few += [case for case in context() if case.on.world == 2]
    few += sparse()[:3]
    return sorted([*covering(cases, seen, cost), *few], key=lambda case: case.on.world)


def pairs(case: Case, names: Iterable[str]) -> Iterable[Hashable]:
    """(factor, value, factor, value) of every two of the named factors."""
    values = ((name, getattr(case, name)) for name in names)
    for (one, a), (other, b) in itertools.combinations(values, 2):
        yield one, a, other, b


def covering(
    cases: Sequence[Case], seen: Callable[[Case], Iterable[Hashable]], cost: Callable[[Case], float] = lambda case: 1.0
) -> list[Case]:
    """A few of ``cases`` in which is seen all that is seen in any of them: greedy by what a case adds for its cost, of
    equals what was seen least."""
    features = [frozenset(seen(case)) for case in cases]
    numbers = {feature: number for number, feature in enumerate(sorted(set().union(*features), key=repr))}
    masks = [sum(1 << numbers[feature] for feature in some) for some in features]
    costs = [cost(case) for case in cases]
    left = (1 << len(numbers)) - 1
    times: Counter[Hashable] = Counter()
    chosen = []
    while left:
        gains = [(left & mask).bit_count() / price for mask, price in zip(masks, costs, strict=True)]
        best = max(gains)
        equals = [number for number, gain in enumerate(gains) if gain == best]
        number = min(equals, key=lambda number: sum(map(times.__getitem__, features[number])))
        chosen.append(cases[number])
        times.update(features[number])
        left &= ~masks[number]
    return chosen
