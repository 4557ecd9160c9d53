"""Finds which ranks share a machine, and the addresses by which machines reach each other."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from quern.train.processes.address import own_address, reached_by
from quern.train.processes.agree import Agreement

__all__ = ["Nodes", "find_nodes", "reachable_address"]


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
        """Whether this is its node's lowest rank, which does the work needed once per node."""
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


def reachable_address(agreement: Agreement, nodes: Nodes) -> str:
    """The address under which the other machines find this one. Collective.

    A machine that takes ``MASTER_ADDR`` for its own loopback, as the master's own may, asks for its way to another.
    """
    found = agreement.gather(own_address(os.environ.get("MASTER_ADDR") or "127.0.0.1"))
    mine = found[nodes.rank]
    return reached_by(mine, found) if len(set(nodes.hosts)) > 1 else mine
