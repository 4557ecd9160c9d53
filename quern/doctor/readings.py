"""What a rank reads of its machine and of links, and what is found in it: plain values, checked when they are read."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Device", "Disk", "Finding", "Link", "Problem", "Reading"]

Text = Annotated[str, Field(max_length=2000)]
Number = Annotated[int, Field(ge=0)]
Repeats = list[Annotated[float, Field(ge=0)]]  # of one measurement; more is better


class _Told(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Problem(_Told):
    """What a rank found wrong by itself; ``code`` chooses the advice."""

    code: Text
    text: Text


class Device(_Told):
    """A GPU (``cuda:3``), or the processor where there is none (``cpu``). Only devices of one ``kind``, the model, are
    compared. Counters are null without NVML; ECC errors are the uncorrected ones since the driver was loaded, XIDs
    those reported while the GPU was under load."""

    name: Text
    kind: Text
    speeds: dict[Text, Repeats] = {}
    ecc_errors: Number | None = None
    remapped_rows: Number | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    xids: list[Number] = []
    throttled: list[Text] = []
    sm_clock_mhz: Number | None = None
    max_sm_clock_mhz: Number | None = None


class Disk(_Told):
    """A folder's file system, in bytes."""

    path: Text
    total: Number
    free: Number


class Reading(_Told):
    """Everything that one rank says, whom others reach by ``address``. What belongs to the whole node, its first rank
    says: ``facts``, the same on every node, and what is ``shown`` need not be; ``speeds`` are of disks and memory."""

    rank: Number
    node: Text
    local_rank: Number = 0
    address: Text = ""
    facts: dict[Text, Text] = {}
    shown: dict[Text, Text] = {}
    speeds: dict[Text, Repeats] = {}
    devices: list[Device] = []
    disks: list[Disk] = []
    problems: list[Problem] = []


class Link(_Told):
    """A connection of two ranks (``local``: of one node) or of a ring of them, measured together, as one of them saw
    it: bytes per second and direction, a ring's bus bandwidth, or why there are none. ``late``: the rank has waited so
    long for it that it measures no other."""

    kind: Literal["pair", "local pair", "ring"]
    ranks: list[Number]
    speeds: Repeats = []
    problem: Text = ""
    late: bool = False


class Finding(NamedTuple):
    """One thing that is wrong, and what to do about it. ``where``: a device, a folder, a pair; empty: the node."""

    code: str
    nodes: tuple[str, ...]
    where: str
    text: str
    todo: str
