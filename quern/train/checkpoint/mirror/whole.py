"""Finds a complete copy of each file of a checkpoint among the nodes' disks, and restores files that none has.

All ranks take each step together and compute the same assignment, so that every file is hashed once where that
suffices, and the reading is spread over disks and ranks. A *site* is a folder that some ranks see: the run's folder
(all ranks) or a node's (its ranks).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from quern.errors import QuernError
from quern.train.checkpoint.format.manifest import MISSING, FileRecord, Problem, check_file
from quern.train.processes.agree import Agreement

__all__ = ["Fetch", "Found", "Sites", "find_whole"]

log = logging.getLogger(__name__)

_OWN = re.compile(r"__(\d+)_\d+\.distcp")

#: Brings a file from elsewhere into a folder, whole and with its checksum, or raises QuernError.
Fetch = Callable[[str, FileRecord, str], object]


@dataclass(frozen=True)
class Sites:
    """The folders and the ranks that see each of them."""

    ranks: tuple[tuple[int, ...], ...]
    mine: int
    """The site of this rank."""

    @cached_property
    def _of(self) -> dict[int, int]:
        return {rank: site for site, ranks in enumerate(self.ranks) for rank in ranks}

    def writer(self, name: str) -> int:
        """The rank that keeps a file if any copy will do: the one that would write it."""
        match = _OWN.fullmatch(name)
        return int(match[1]) % len(self._of) if match else 0

    def of(self, rank: int) -> int:
        """The site of a rank."""
        return self._of[rank]


@dataclass
class Found:
    """The locations of complete copies; the same on every rank."""

    holders: dict[str, int] = field(default_factory=dict)
    """The site of one whole copy by file."""
    problems: dict[str, list[Problem]] = field(default_factory=dict)
    """Of every copy that is not whole, by file."""

    def missing(self, names: Collection[str]) -> list[Problem]:
        """The problems with files that have no complete copy: for each the last one that was tried."""
        return [problem for name in names if name not in self.holders for problem in self.problems.get(name, [])]


def find_whole(
    agreement: Agreement,
    sites: Sites,
    folder: str,
    records: Mapping[str, FileRecord],
    *,
    hashes: bool,
    fetch: Fetch | None = None,
) -> Found:
    """Find a complete copy of each of ``records`` in the sites' folders; ``fetch`` those that have none. Collective.

    Args:
        folder: this rank's site's.
        hashes: compare SHA-256 besides presence and size.
        fetch: asked on one rank for each file that no site has whole, into the site of the rank that would write it.
    """
    found = Found()

    def present() -> tuple[str, dict[str, Problem | None]]:
        """Of what is here alone: at a thousand nodes the rest is nearly all."""
        looks = {}
        if agreement.rank == sites.ranks[sites.mine][0]:
            looks = {name: check_file(folder, name, record, hashes=False) for name, record in records.items()}
        return folder, {name: look for name, look in looks.items() if look is None or look.what != MISSING}

    looks = agreement.gather_results(present)
    held: dict[str, list[int]] = {name: [] for name in records}
    for site, ranks in enumerate(sites.ranks):
        for name, problem in looks[ranks[0]][1].items():
            if problem is None:
                held[name].append(site)
            else:
                found.problems.setdefault(name, []).append(problem)
    for name in records:
        if not held[name] and name not in found.problems:
            home = looks[sites.ranks[sites.of(sites.writer(name))][0]][0]
            found.problems[name] = [Problem(os.path.join(home, name), MISSING)]
    while tasks := _choose(sites, records, {name: at for name, at in held.items() if name not in found.holders and at}):
        mine = [name for name, rank in tasks.items() if rank == agreement.rank]

        def compare(mine: Sequence[str] = mine) -> dict[str, Problem | None]:
            return {name: check_file(folder, name, records[name], hashes=hashes) for name in mine}

        for rank, outcome in enumerate(agreement.gather(agreement.all_or_raise_with_keepalive(compare))):
            for name, problem in outcome.items():
                site = sites.of(rank)
                held[name].remove(site)
                if problem is None:
                    found.holders[name] = site
                else:
                    found.problems.setdefault(name, []).append(problem)
    if fetch is not None:
        _fetch(agreement, sites, folder, records, fetch, found)
    return found


def _choose(sites: Sites, records: Mapping[str, FileRecord], held: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The rank that hashes each file: of its writer's site if that has it, else of the site with the least to do."""
    load = [0] * sum(map(len, sites.ranks))
    tasks = {}
    for name in sorted(held, key=lambda name: (-records[name].size, name)):
        own = sites.of(sites.writer(name))
        at = (
            own
            if own in held[name]
            else min(held[name], key=lambda site: min(load[rank] for rank in sites.ranks[site]))
        )
        tasks[name] = min(sites.ranks[at], key=lambda rank: load[rank])
        load[tasks[name]] += records[name].size
    return tasks


def _fetch(
    agreement: Agreement, sites: Sites, folder: str, records: Mapping[str, FileRecord], fetch: Fetch, found: Found
) -> None:
    lost = sorted(name for name in records if name not in found.holders)
    if not lost:
        return
    mine = [name for name in lost if sites.writer(name) == agreement.rank]

    def bring() -> dict[str, str | None]:
        outcome: dict[str, str | None] = {}
        for name in mine:
            try:
                fetch(name, records[name], folder)
                outcome[name] = None
            except QuernError as error:
                outcome[name] = str(error)
        return outcome

    back = []
    for rank, outcome in enumerate(agreement.gather(agreement.all_or_raise_with_keepalive(bring))):
        for name, failure in outcome.items():
            if failure is None:
                found.holders[name] = sites.of(rank)
                back.append(name)
            else:
                found.problems.setdefault(name, []).append(Problem(name, failure))
    if back and agreement.rank == 0:
        damaged = [problem for name in back for problem in found.problems.get(name, []) if problem.what != MISSING]
        for problem in damaged:
            log.warning("%s; put back from the store", problem)
        log.info("%s: %d of %d files came from the store", folder, len(back), len(records))
