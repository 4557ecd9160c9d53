"""What a rank reads of its machine and of links, and what is found in it: plain values, checked when they are read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from quern.errors import InputError, one_line

__all__ = ["Device", "Disk", "Finding", "Link", "Problem", "Reading", "Speeds", "dumped", "loaded"]

T = TypeVar("T")

_made: dict[Any, Any] = {}
_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

Text = Annotated[str, Field(max_length=2000)]
Number = Annotated[int, Field(ge=0)]
Speeds = dict[Text, list[Annotated[float, Field(ge=0)]]]
"""Repeats of each measurement; more is better."""


def loaded(kind: type[T], value: Any, where: str) -> T:
    """``value``, of a file of another rank, as one of these classes.

    Raises:
        InputError: naming ``where``, the field and what was expected.
    """
    try:
        return _adapters(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_name = ".".join(map(str, first["loc"])) or "value"
        got = f"{first['input']!r:.80}"
        raise InputError(f"{where}: {field_name}: {one_line(ValueError(first['msg']))}, got {got}") from None


def dumped(value: Any) -> dict[str, Any]:
    """One of these as JSON holds it."""
    return asdict(value)


def _adapters(kind: type[T]) -> TypeAdapter[T]:
    """Made once a class, which takes a moment."""
    if kind not in _made:
        _made[kind] = TypeAdapter(kind)
    found: TypeAdapter[T] = _made[kind]
    return found


@dataclass(frozen=True)
class Problem:
    """What a rank found wrong by itself; ``code`` chooses the advice."""

    __pydantic_config__ = _STRICT
    code: Text
    text: Text


@dataclass(frozen=True)
class Device:
    """A GPU, or the processor where there is none. Without NVML the counters of errors are null."""

    __pydantic_config__ = _STRICT
    name: Text
    """``cuda:3``, ``cpu``."""
    kind: Text
    """The model; only devices of one kind are compared."""
    speeds: Speeds = field(default_factory=dict)
    ecc_errors: Number | None = None
    """Uncorrected, since the driver was loaded."""
    remapped_rows: Number | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    xids: list[Number] = field(default_factory=list)
    """Errors that the driver reported while the GPU was under load."""
    throttled: list[Text] = field(default_factory=list)
    sm_clock_mhz: Number | None = None
    max_sm_clock_mhz: Number | None = None


@dataclass(frozen=True)
class Disk:
    """A folder's file system, in bytes."""

    __pydantic_config__ = _STRICT
    path: Text
    total: Number
    free: Number


@dataclass(frozen=True)
class Reading:
    """Everything that one rank says. What belongs to the whole node, its first rank says."""

    __pydantic_config__ = _STRICT
    rank: Number
    node: Text
    local_rank: Number = 0
    facts: dict[Text, Text] = field(default_factory=dict)
    """What has to be the same on every node."""
    shown: dict[Text, Text] = field(default_factory=dict)
    """What need not be."""
    speeds: Speeds = field(default_factory=dict)
    """Of the node: disks, memory."""
    devices: list[Device] = field(default_factory=list)
    disks: list[Disk] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True)
class Link:
    """A connection of two ranks or of a ring of them, measured together, as one of them saw it."""

    __pydantic_config__ = _STRICT
    kind: Literal["pair", "local pair", "ring", "local ring"]
    """``local``: inside one node."""
    ranks: list[Number]
    speeds: list[Annotated[float, Field(ge=0)]] = field(default_factory=list)
    """Bytes per second and direction; a ring's are its bus bandwidth."""
    problem: Text = ""
    """Why there are none."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, where, and what to do about it."""

    code: str
    nodes: tuple[str, ...]
    where: str
    """More precisely: a device, a folder, a pair of ranks; empty: the node."""
    text: str
    todo: str
