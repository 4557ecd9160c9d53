"""What a rank reads of its machine and of links, and what is found in it: plain values, checked when they are read."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Device", "Disk", "Finding", "Link", "Problem", "Reading", "Text"]

Text = Annotated[str, Field(max_length=2000)]
Number = Annotated[int, Field(ge=0)]
Repeats = list[Annotated[float, Field(ge=0)]]
"""Of one measurement; more is better."""


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Problem(_Told):
    """What a rank found wrong by itself; ``code`` chooses the advice."""

    code: Text
    text: Text


class Device(_Told):
    """A GPU, or the processor where there is none. Without NVML the counters of errors are null."""

    name: Text
    """``cuda:3``, ``cpu``."""
    kind: Text
    """The model; only devices of one kind are compared."""
    speeds: dict[Text, Repeats] = {}
    ecc_errors: Number | None = None
    """Uncorrected, since the driver was loaded."""
    remapped_rows: Number | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    xids: list[Number] = []
    """Errors that the driver reported while the GPU was under load."""
    throttled: list[Text] = []
    sm_clock_mhz: Number | None = None
    max_sm_clock_mhz: Number | None = None


class Disk(_Told):
    """A folder's file system, in bytes."""

    path: Text
    total: Number
    free: Number


class Reading(_Told):
    """Everything that one rank says. What belongs to the whole node, its first rank says."""

    rank: Number
    node: Text
    local_rank: Number = 0
    address: Text = ""
    """By which other machines reach it."""
    facts: dict[Text, Text] = {}
    """What has to be the same on every node."""
    shown: dict[Text, Text] = {}
    """What need not be."""
    speeds: dict[Text, Repeats] = {}
    """Of the node: disks, memory."""
    devices: list[Device] = []
    disks: list[Disk] = []
    problems: list[Problem] = []


class Link(_Told):
    """A connection of two ranks or of a ring of them, measured together, as one of them saw it."""

    kind: Literal["pair", "local pair", "ring"]
    """``local``: inside one node."""
    ranks: list[Number]
    speeds: Repeats = []
    """Bytes per second and direction; a ring's are its bus bandwidth."""
    problem: Text = ""
    """Why there are none."""
    late: bool = False
    """Who tells it has waited so long for it that it measures no other."""


class Finding(NamedTuple):
    """One thing that is wrong, where, and what to do about it."""

    code: str
    nodes: tuple[str, ...]
    where: str
    """More precisely: a device, a folder, a pair of ranks; empty: the node."""
    text: str
    todo: str
