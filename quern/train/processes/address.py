"""Finds the address by which other machines reach this one. Imports no torch."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

__all__ = ["is_loopback", "own_address", "reached_by"]


def own_address(towards: str) -> str:
    """The address of this machine on its way to another; no packet is sent. 127.0.0.1 where there is no way."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(towards, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the second of what cannot be a name
        return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches itself by it."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reached_by(own: str, others: Iterable[str]) -> str:
    """``own``, or where that is a loopback, as a machine's own name often is, the address on the way to one of the
    ``others`` that is none."""
    if not is_loopback(own):
        return own
    return own_address(next((address for address in others if not is_loopback(address)), own))
