"""Compares the manifests, configs and tensors of two checkpoints.

Tensors are read in slices (:mod:`quern.train.checkpoint.format.slices`), so memory depends neither on the
model nor on how its tensors were cut into chunks: two slices of :data:`SLICE_BYTES` for each of the two checkpoints,
a mark for each of their elements, and some 20 MB for the comparison.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml

from quern.errors import InputError, one_line
from quern.train.checkpoint.format.file_locations import check_together
from quern.train.checkpoint.format.manifest import CONFIG_FILE, Manifest, as_json
from quern.train.checkpoint.format.slices import StoredTensors, boxes

__all__ = ["SLICE_BYTES", "Comparison", "Fact", "TensorDifference", "compare"]

#: Largest slice of a tensor that is read at a time.
SLICE_BYTES = 32 << 20
#: Elements that are compared at a time, in float64.
_BLOCK = 1 << 18
#: What a manifest records of how a state came about. Not part of the state: two runs may differ here and be equal.
_RECORDS = ("config_digest", "layout", "ledger_offset", "precision", "run", "schema", "written_by")
#: How the names of weights and of AdamW's moments begin.
_WEIGHTS, _MOMENTS = "model.", "optimizer.state."
#: What each manifest says of its own files.
_OWN = ("checksum", "files")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Of a config that is compared key by key.
_MAX_CONFIG_BYTES, _MAX_KEYS, _MAX_DEPTH = 4 << 20, 100_000, 64


@dataclass(frozen=True)
class Fact:
    """A field of the manifests or configs, by dotted name, in which two checkpoints differ."""

    name: str
    values: Mapping[str, Any]
    """By ``a`` and ``b``; a side that has no such field is missing."""
    state: bool
    """Whether it is part of the state. Layout, precision, software, ledger and config are a record of its making."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {"name": self.name, "state": self.state} | {side: as_json(v) for side, v in self.values.items()}


@dataclass(frozen=True)
class TensorDifference:
    """The difference between two checkpoints' tensors of one name."""

    name: str
    sizes: Mapping[str, tuple[int, ...]]
    """By ``a`` and ``b``; a side that does not have the tensor is missing."""
    dtypes: Mapping[str, str]
    differing: int | None = None
    """Elements whose bits differ (whose values differ, where the types do); None: the sizes differ."""
    max_abs: float = 0.0
    """max |a−b| over the elements that are numbers on both sides."""
    relative: float = 0.0
    """``max_abs`` / max |b| over b's finite elements; inf: a NaN stands on one side alone, or b is 0 throughout."""
    nans: Mapping[str, int] = field(default_factory=lambda: {"a": 0, "b": 0})
    """NaNs that stand on this side alone."""

    @property
    def equal(self) -> bool:
        """Whether the tensors are equal bit for bit, in one type. Equal NaNs are equal, 0 and −0 are not."""
        return self.differing == 0 and self.dtypes["a"] == self.dtypes["b"]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON; a number JSON does not have is a text."""
        return {
            **vars(self),
            "equal": self.equal,
            "max_abs": None if self.differing is None else as_json(self.max_abs),
            "relative": None if self.differing is None else as_json(self.relative),
        }


@dataclass(frozen=True)
class Comparison:
    """How two checkpoints differ."""

    a: str
    b: str
    moments: bool
    """Whether AdamW's moments were compared."""
    optimizer_in: str | None
    """The side, ``a`` or ``b``, that alone has an optimizer's state, so that only weights, model and encoding were
    compared; None: all that both have was."""
    facts: tuple[Fact, ...]
    config: tuple[Fact, ...]
    tensors: tuple[TensorDifference, ...]
    """All that were looked at: those without a counterpart first, then by falling relative difference, then by name."""

    @property
    def equal_tensors(self) -> int:
        """How many are bitwise equal."""
        return sum(tensor.equal for tensor in self.tensors)

    @property
    def equal(self) -> bool:
        """Whether both are one state: all tensors bit for bit, and every manifest field that is part of it."""
        return self.equal_tensors == len(self.tensors) and not any(fact.state for fact in self.facts)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "a": self.a,
            "b": self.b,
            "moments": self.moments,
            "optimizer_only_in": self.optimizer_in,
            "equal": self.equal,
            "equal_tensors": self.equal_tensors,
            "facts": [fact.to_dict() for fact in self.facts],
            "config": [fact.to_dict() for fact in self.config],
            "tensors": [tensor.to_dict() for tensor in self.tensors],
        }


def compare(a: str, b: str, *, moments: bool | None = None) -> Comparison:
    """Compare the checkpoints at ``a`` and ``b``: manifests, configs, weights, ``extra`` tensors, AdamW's step count
    and, with ``moments``, its moments; None: unless one of the two alone has any. Where one alone has the state of an
    optimizer, weights, model and encoding decide, unless ``moments`` is true. How the tensors were cut into chunks and
    files does not matter.

    Raises:
        InputError: one is no checkpoint, its files of tensors are elsewhere, or its metadata or a stored tensor is
            damaged.
        QuernError: a file could not be read.
    """
    for path in (a, b):
        check_together(path)
    ours, theirs = StoredTensors(a), StoredTensors(b)
    trained, only = ours.manifest.optimizer, None
    if trained != theirs.manifest.optimizer and not moments:
        moments, only = False, "a" if trained else "b"
    elif moments is None:
        has = [any(name.startswith(_MOMENTS) for name in side.tensors) for side in (ours, theirs)]
        moments = has[0] == has[1]
    names = sorted(
        name
        for name in ours.tensors.keys() | theirs.tensors.keys()
        if name.startswith(_WEIGHTS) or (only is None and (moments or not name.startswith(_MOMENTS)))
    )
    tensors = sorted((_compare_tensor(name, ours, theirs) for name in names), key=_worst_first)

    def decides(field: str) -> bool:
        top = field.split(".")[0]
        return top not in _RECORDS if only is None else top in ("model", "encoding")

    facts = _differing(_flat(_facts(ours.manifest), a), _flat(_facts(theirs.manifest), b), decides)
    config = _differing(_config(ours), _config(theirs), lambda name: False)
    return Comparison(a, b, moments, only, facts, config, tuple(tensors))


def _worst_first(tensor: TensorDifference) -> tuple[bool, bool, float, float, str]:
    return tensor.equal, tensor.differing is not None, -tensor.relative, -tensor.max_abs, tensor.name


def _compare_tensor(name: str, ours: StoredTensors, theirs: StoredTensors) -> TensorDifference:
    found = {side: stored.tensors[name] for side, stored in (("a", ours), ("b", theirs)) if name in stored.tensors}
    sizes = {side: tuple(stored.size) for side, stored in found.items()}
    dtypes = {side: str(stored.properties.dtype).removeprefix("torch.") for side, stored in found.items()}
    if len(found) < 2 or sizes["a"] != sizes["b"]:
        return TensorDifference(name, sizes, dtypes)
    tally = _Tally(same_type=dtypes["a"] == dtypes["b"])
    limit = SLICE_BYTES // max(stored.properties.dtype.itemsize for stored in found.values())
    for box in boxes(sizes["a"], limit):
        tally.add(ours.read(name, box).reshape(-1), theirs.read(name, box).reshape(-1))
    nans = {"a": tally.nans_a, "b": tally.nans_b}
    return TensorDifference(name, sizes, dtypes, tally.differing, tally.max_abs, tally.relative, nans)


@dataclass
class _Tally:
    """Counts over the slices of a tensor."""

    same_type: bool
    differing: int = 0
    max_abs: float = 0.0
    scale: float = 0.0
    nans_a: int = 0
    nans_b: int = 0

    @property
    def relative(self) -> float:
        if self.nans_a or self.nans_b:
            return math.inf
        if not self.max_abs:
            return 0.0
        return self.max_abs / self.scale if self.scale else math.inf

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """``a`` and ``b``: as many elements, in one dimension."""
        for start in range(0, len(a), _BLOCK):
            self._add(a[start : start + _BLOCK], b[start : start + _BLOCK])

    def _add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        x, y = a.double(), b.double()
        x_nan, y_nan = x.isnan(), y.isnan()
        if self.same_type:
            integer = _INTEGERS[a.dtype.itemsize]
            differ = a.view(integer) != b.view(integer)
        else:
            differ = (x != y) & ~(x_nan & y_nan)
        self.scale = max(self.scale, float(y[y.isfinite()].abs().amax()) if bool(y.isfinite().any()) else 0.0)
        if not bool(differ.any()):
            return
        self.differing += int(differ.sum())
        self.nans_a += int((x_nan & ~y_nan).sum())
        self.nans_b += int((y_nan & ~x_nan).sum())
        gaps = (x - y)[differ & ~x_nan & ~y_nan].abs()
        if len(gaps):
            self.max_abs = max(self.max_abs, float(gaps.amax()))


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {name: value for name, value in manifest.to_dict().items() if name not in _OWN}


def _config(checkpoint: StoredTensors) -> dict[str, Any]:
    """The checkpoint's config by dotted key; imported weights have none."""
    record = checkpoint.manifest.files.get(CONFIG_FILE)
    if record is None:
        return {}
    file = os.path.join(checkpoint.path, CONFIG_FILE)
    if record.size > _MAX_CONFIG_BYTES:
        raise InputError(f"{file}: expected a config of at most {_MAX_CONFIG_BYTES} bytes, has {record.size}")
    try:
        with open(file, encoding="utf-8") as stream:
            return _flat(yaml.safe_load(stream), file)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid YAML ({one_line(error)})") from None


def _flat(value: Any, file: str) -> dict[str, Any]:
    """Leaves by dotted name. YAML may refer to a value again and again, even to itself: there is an end to it."""
    found: dict[str, Any] = {}

    def walk(name: str, value: Any, depth: int) -> None:
        if depth > _MAX_DEPTH or len(found) > _MAX_KEYS:
            raise InputError(f"{file}: expected at most {_MAX_KEYS} keys and {_MAX_DEPTH} levels, has more")
        items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        leaf = True
        for key, inner in items:
            leaf = False
            walk(f"{name}.{key}" if name else str(key), inner, depth + 1)
        if leaf:
            found[name] = value

    walk("", value, 0)
    return found


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], state: Callable[[str], bool]) -> tuple[Fact, ...]:
    above = {name[:at] for fields in (a, b) for name in fields for at, letter in enumerate(name) if letter == "."}
    found = []
    for name in sorted(a.keys() | b.keys()):
        values = {side: fields[name] for side, fields in (("a", a), ("b", b)) if name in fields}
        if len(values) == 2 and repr(values["a"]) == repr(values["b"]):
            continue
        if len(values) == 1 and next(iter(values.values())) in ({}, []) and name in above:
            continue  # the other side has something in it, which is listed
        found.append(Fact(name, values, state(name)))
    return tuple(found)
