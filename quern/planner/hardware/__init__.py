"""Profiles of accelerators and clusters: the figures that a plan goes by, each with its source. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import yaml
from pydantic import Field

from quern.config import Section, read_yaml, validate
from quern.errors import InputError

__all__ = ["Efficiency", "Hardware", "Link", "load_hardware", "names", "profile_of"]

Rate = Annotated[float, Field(gt=0)]


class Link(Section):
    """A network between GPUs."""

    bytes_per_s: Rate
    """[B/s] Of one GPU, in one direction."""
    latency_s: Annotated[float, Field(ge=0)]
    """[s] Of one hop of a collective, software included."""


class Efficiency(Section):
    """Shares of peak figures that long operations reach; measured, or of calibration runs."""

    products: Annotated[float, Field(gt=0, le=1)]
    """Large products of matrices in BF16, of ``flops``."""
    float8: Annotated[float, Field(gt=0, le=1)]
    """The same in FP8, of ``float8_flops``."""
    attention: Annotated[float, Field(gt=0, le=1)]
    """Flash attention, of ``flops``."""
    memory: Annotated[float, Field(gt=0, le=1)]
    """Element-wise kernels, of ``memory_bytes_per_s``."""
    links: Annotated[float, Field(gt=0, le=1)]
    """Collectives of large messages, of ``bytes_per_s`` of a link."""


class Hardware(Section):
    """One kind of GPU in one kind of cluster."""

    title: str
    devices: tuple[str, ...] = ()
    """Names that CUDA or ROCm gives such a GPU."""
    memory_gib: Rate
    """[GiB] Of one GPU, all of it."""
    reserved_gib: Annotated[float, Field(ge=0)]
    """[GiB] Of it what no tensor can have: context, libraries, communicators."""
    fragmentation: Annotated[float, Field(ge=0, lt=1)]
    """Of memory that comes and goes in a step, the share that the allocator cannot use."""
    flops: Rate
    """[FLOP/s] Dense BF16 products."""
    float8_flops: Rate | None
    """[FLOP/s] Dense FP8 products; null = there are none."""
    memory_bytes_per_s: Rate
    """[B/s] Of the GPU's memory."""
    node: Annotated[int, Field(ge=1)]
    """[GPUs] That ``inside`` joins."""
    inside: Link
    """Between GPUs of a node (NVLink, xGMI)."""
    outside: Link
    """Between nodes."""
    host_bytes_per_s: Rate
    """[B/s] Between a GPU and the host's memory, in one direction."""
    host_gib: Rate
    """[GiB] Of the host's memory for each GPU."""
    dollars_per_hour: Annotated[float, Field(ge=0)]
    """[$/h] Of one GPU; an assumption, which --price replaces."""
    kernel_s: Annotated[float, Field(ge=0)]
    """[s] That a kernel takes at least, and that the host takes to start one."""
    efficiency: Efficiency
    sources: Mapping[str, str]
    """Of each figure where it is from."""


@cache
def _profiles() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(files("quern.planner").joinpath("hardware.yaml").read_text("utf-8"))
    return found


def names() -> list[str]:
    """Of the profiles that are there."""
    return list(_profiles())


def profile_of(device: object) -> str | None:
    """The only profile that has a device of this name; None where none or several have."""
    found = [name for name, profile in _profiles().items() if device in profile["devices"]]
    return found[0] if len(found) == 1 else None


def load_hardware(name: str) -> Hardware:
    """A profile by name, or of a YAML file that ``quern plan calibrate`` wrote (a path that ends in .yaml).

    Raises:
        InputError: there is no such profile, or the file is none.
    """
    profiles = _profiles()
    if name in profiles:
        return Hardware.model_validate(profiles[name])
    if not name.endswith((".yaml", ".yml")):
        raise InputError(f"--gpu: expected one of {', '.join(profiles)}, or a YAML file of such figures, got {name!r}")
    return validate(read_yaml(name), Hardware, name)
