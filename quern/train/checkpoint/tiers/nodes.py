"""Which ranks share a machine, and under which address the machines reach each other."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from quern.train.agree import Agreement

__all__ = ["Nodes", "find_nodes", "own_address"]


@dataclass(frozen=True)
class Nodes:
    """The machines of a run, numbered by their lowest rank."""

    rank: int
    """This one."""
    of_rank: tuple[int, ...]
    """Node of every rank."""
    hosts: tuple[str, ...]
    """Name of every node."""

    @property
    def mine(self) -> int:
        """This rank's node."""
        return self.of_rank[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this is its node's lowest rank, which does what is done once a node."""
        return self.of_rank.index(self.mine) == self.rank

    def ranks(self, node: int) -> tuple[int, ...]:
        """The ranks on a node, ascending."""
        return tuple(rank for rank, found in enumerate(self.of_rank) if found == node)


def find_nodes(agreement: Agreement) -> Nodes:
    """Ask all ranks where they are: by host name and torchrun's ``GROUP_RANK``, which two agents on one machine have
    to themselves. Collective."""
    host = socket.gethostname()
    keys = agreement.gather((host, os.environ.get("GROUP_RANK", "")))
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return Nodes(agreement.rank, tuple(numbers[key] for key in keys), tuple(host for host, _ in numbers))


def own_address(port: int = 1) -> str:
    """The address of this machine on its way to ``MASTER_ADDR``, where the other machines find it; no packet is sent.

    127.0.0.1 where there is no master, or it is this machine's loopback.
    """
    master = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):  # the second of what cannot be a name
        return "127.0.0.1"
