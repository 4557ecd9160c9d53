"""The state of a training run as checkpoint tensors, under names that do not depend on the layout.

``model.<name>`` are parameters and persistent buffers by global name, ``optimizer.state.<name>.exp_avg`` and
``.exp_avg_sq`` AdamW's moments, ``optimizer.step`` its one step counter, ``extra.<name>`` small tensors that are equal
on every rank. Learning rates and other hyperparameters are the config's and never stored.

A rank may have only some of a model's tensors (a pipeline's stage), so what a checkpoint must hold is told from the
model's shape. Tied embeddings that a pipeline has twice are stored once, as ``embed.weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from quern.errors import InputError, QuernError
from quern.model.config import ModelShape
from quern.model.transformer import Transformer
from quern.parallel.gradients import EMBEDDING, TIED
from quern.train.checkpoint.format.manifest import EncodingInfo, RunFacts
from quern.train.checkpoint.format.unpadded import PADDED

__all__ = [
    "EXTRA", "TensorView", "TrainState", "check_encoding", "check_shape", "check_tensors", "conversion",
    "padded_rows", "stored_sizes", "view_tensors", "weight_sizes",
]  # fmt: skip

_MOMENTS = (".exp_avg", ".exp_avg_sq")
_STEP = "optimizer.step"
EXTRA = "extra."


@dataclass(frozen=True)
class TrainState:
    """All state of a run that changes during training and is in memory."""

    model: nn.Module
    """This rank's part of it: plain, wrapped by DDP, sharded by FSDP2, split over ranks, or some stages of it."""
    optimizer: torch.optim.Optimizer | None
    """``torch.optim.AdamW`` over the model's parameters; None of a model that is not trained."""
    facts: RunFacts
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Replicated tensors by name: the guard's history, the loss scale. Saved; a load hands them out anew."""


@dataclass(frozen=True)
class TensorView:
    """The state's own tensors by stored name; reading into them is loading."""

    tensors: Mapping[str, torch.Tensor]
    rows: Mapping[str, int]
    """Number of real rows of each padded tensor, by stored name."""
    counters: tuple[torch.Tensor, ...]
    """AdamW's step counters, one a parameter, which ``optimizer.step`` stands for."""
    copies: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Second copies of some tensors, which are not stored, by stored name."""

    @property
    def step(self) -> int:
        """AdamW's count of updates."""
        return int(self.tensors[_STEP].item())

    def part(self, prefixes: tuple[str, ...]) -> TensorView:
        """Only the tensors whose names begin so."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name.startswith(prefixes)}
        rows = {name: number for name, number in self.rows.items() if name in tensors}
        copies = {name: copy for name, copy in self.copies.items() if name in tensors}
        return TensorView(tensors, rows, self.counters if _STEP in tensors else (), copies)

    def with_extra(self, metadata: Metadata) -> tuple[TensorView, dict[str, torch.Tensor]]:
        """The view with room for the ``extra`` tensors of a checkpoint, and that room by plain name."""
        room = {
            name: torch.empty(stored.size, dtype=stored.properties.dtype)
            for name, stored in metadata.state_dict_metadata.items()
            if name.startswith(EXTRA) and isinstance(stored, TensorStorageMetadata)
        }
        return replace(self, tensors={**self.tensors, **room}), {
            name.removeprefix(EXTRA): tensor for name, tensor in room.items()
        }

    def clear_padding(self) -> None:
        """Zero the padded tensors, before their real rows are read."""
        with torch.no_grad():
            for name in self.rows:
                self.tensors[name].zero_()

    @torch.no_grad()
    def finish_load(self) -> None:
        """Give every parameter the step counter that was read, and second copies their values."""
        for counter in self.counters:
            counter.copy_(self.tensors[_STEP])
        for name, copy in self.copies.items():
            copy.copy_(self.tensors[name])


def weight_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Size of every weight of the model by global name, unpadded: what a checkpoint of it holds."""
    sizes = {name: tuple(tensor.shape) for name, tensor in _skeleton(shape).state_dict().items()}
    return {name: (shape.vocab_size, *size[1:]) if name in PADDED else size for name, size in sizes.items()}


def _skeleton(shape: ModelShape) -> Transformer:
    with torch.device("meta"):
        return Transformer(shape)


def stored_sizes(shape: ModelShape, parts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Size of every tensor of a checkpoint by stored name, but for ``extra``; ``parts``: only names that begin so."""
    sizes: dict[str, tuple[int, ...]] = {_STEP: ()}
    buffers = dict(_skeleton(shape).named_buffers())
    for name, size in weight_sizes(shape).items():
        moments = () if name in buffers else _MOMENTS
        sizes |= {f"model.{name}": size} | {f"optimizer.state.{name}{moment}": size for moment in moments}
    return {name: size for name, size in sizes.items() if name.startswith(parts)}


def padded_rows(names: Iterable[str], shape: ModelShape) -> dict[str, int]:
    """Number of real rows of those stored ``names`` whose tensors are padded in memory."""
    spellings = {f"model.{name}" for name in PADDED}
    spellings |= {f"optimizer.state.{name}{moment}" for name in PADDED for moment in _MOMENTS}
    return {name: shape.vocab_size for name in names if name in spellings}


def view_tensors(state: TrainState) -> TensorView:
    """The state's tensors under their stored names. Moments that do not exist yet are made, as zeros at step 0.

    Raises:
        QuernError: parameters that were not updated equally often, or state that is not AdamW's.
    """
    weights: Mapping[str, Any] = get_model_state_dict(state.model)
    tensors: dict[str, torch.Tensor] = {f"model.{name}": value for name, value in weights.items()}
    flat: Mapping[str, Any] = {}
    if state.optimizer is not None:
        if not state.optimizer.state:
            _make_moments(state.optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_optimizer_state_dict(state.model, state.optimizer, options=options)
    counters: dict[str, torch.Tensor] = {}
    for name, value in flat.items():
        if not name.startswith("state."):
            continue  # hyperparameters
        if not isinstance(value, torch.Tensor):
            raise QuernError(f"optimizer: {name}: expected a tensor, as AdamW holds, got {type(value).__name__}")
        if name.endswith(".step"):
            counters[name] = value
        elif name.endswith(_MOMENTS):
            tensors[f"optimizer.{name}"] = value
        else:
            raise QuernError(f"optimizer: {name}: expected AdamW's exp_avg, exp_avg_sq and step alone")
    if counters:
        tensors[_STEP] = _one_step(counters)
    copies = {name.replace(TIED, EMBEDDING): tensors.pop(name) for name in list(tensors) if TIED in name}
    tensors |= {EXTRA + name: value for name, value in state.extra.items()}
    return TensorView(tensors, padded_rows(tensors, state.facts.shape), tuple(counters.values()), copies)


def _one_step(counters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    steps = torch.stack([counter.detach().reshape(()).double() for counter in counters.values()]).cpu()
    if not bool((steps == steps[0]).all()):
        name = list(counters)[int((steps != steps[0]).nonzero()[0])]
        raise QuernError(
            f"optimizer: {name}: expected {steps[0]:g}, as of {next(iter(counters))}, got {counters[name].item():g}; "
            f"every parameter takes every step"
        )
    return steps[0].clone()


def _make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Zeros at step 0, as AdamW makes them in its first step. torch would take such a step, with a gradient for every
    parameter: memory that a load has no other use for."""
    dtype: torch.dtype | None = getattr(optimizer, "moments", None)  # the parameter's, where it is not said
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device = parameter.device if group.get("fused") or group["capturable"] else torch.device("cpu")
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format),
            }


def conversion(metadata: Metadata, view: TensorView) -> str | None:
    """What a load makes of the moments, where they are kept in another type than they are stored in."""
    for name, tensor in view.tensors.items():
        stored = metadata.state_dict_metadata.get(name)
        if name.endswith(_MOMENTS) and isinstance(stored, TensorStorageMetadata):
            theirs, ours = (str(dtype).removeprefix("torch.") for dtype in (stored.properties.dtype, tensor.dtype))
            return None if theirs == ours else f"{theirs} → {ours}"
    return None


def check_shape(file: str, found: ModelShape, expected: ModelShape) -> None:
    """Check that weights of one shape fit a model of another; ``vocab_multiple`` may differ.

    Raises:
        InputError: naming ``file`` and the field.
    """
    theirs, ours = ({"moe": None} | shape.model_dump() for shape in (found, expected))
    for name, value in ours.items():
        if name != "vocab_multiple" and theirs[name] != value:
            raise InputError(f"{file}: model.{name}: expected {value!r}, as in the config, got {theirs[name]!r}")


def check_encoding(file: str, found: EncodingInfo | None, expected: EncodingInfo) -> None:
    """Check that the embedding's rows belong to the data's ids; weights of unknown encoding pass.

    Raises:
        InputError: naming ``file`` and the field. Two vocabularies of one size are still two.
    """
    for name in ("ranks_sha256", "eot_id"):
        theirs, ours = getattr(found, name, None), getattr(expected, name)
        if found is not None and theirs != ours:
            raise InputError(
                f"{file}: encoding.{name}: expected {ours!r}, as in the data (encoding {expected.name}), "
                f"got {theirs!r} ({found.name}); the weights were trained on other ids"
            )


def check_tensors(
    file: str, metadata: Metadata, shape: ModelShape, parts: tuple[str, ...], view: TensorView | None = None
) -> None:
    """Whether a checkpoint holds the tensors of a model of ``shape``, in size, and no others of ``parts`` (name
    prefixes); and whether those of ``view``, this rank's, can be read without loss of precision: a moment that is kept
    in BF16 may be rounded.

    Raises:
        InputError: naming ``file``, the tensor, what the checkpoint has and what was expected.
    """
    stored, expected = metadata.state_dict_metadata, stored_sizes(shape, parts)
    for name, size in expected.items():
        found = stored.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise InputError(f"{file}: {name}: missing in the checkpoint; the config's model has it")
        if tuple(found.size) != size:
            raise InputError(f"{file}: {name}: expected size {list(size)}, the checkpoint has {list(found.size)}")
        tensor = None if view is None else view.tensors.get(name)
        if tensor is not None and name.endswith(_MOMENTS) and tensor.dtype == torch.bfloat16:
            continue
        if tensor is not None and torch.promote_types(found.properties.dtype, tensor.dtype) != tensor.dtype:
            raise InputError(
                f"{file}: {name}: expected {tensor.dtype} or a type it contains, "
                f"the checkpoint has {found.properties.dtype}"
            )
    for name in stored:
        if name.startswith(parts) and name not in expected:
            raise InputError(f"{file}: {name}: the checkpoint has it; the config's model does not")
    strange = set() if view is None else view.tensors.keys() - expected.keys()
    assert not strange, f"not tensors of this model: {sorted(strange)}"
