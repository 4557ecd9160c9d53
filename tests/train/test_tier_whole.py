"""Each file's whole copy is found wherever it is, nobody hashes more than that takes, and all ranks agree."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import tempfile
import threading
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quern.errors import QuernError
from quern.train.checkpoint.format.manifest import FileRecord, check_file
from quern.train.checkpoint.mirror import whole
from quern.train.checkpoint.mirror.whole import Sites, find_whole
from support.train.rank_threads import Meeting, results, run_all

NAMES = [".metadata", "config.yaml", *(f"__{rank}_{n}.distcp" for rank in (0, 1, 2, 3, 5, 12) for n in (0, 1))]
COPIES = ("absent", "short", "flipped", "folder", "whole")
FETCHES = ("brings", "fails")


def content(name: str, size: int) -> bytes:
    return hashlib.shake_256(name.encode()).digest(size)


def put(folder: Path, name: str, data: bytes, copy: str) -> None:
    if copy == "folder":
        (folder / name).mkdir()
    elif copy == "short":
        (folder / name).write_bytes(data[:-1])
    elif copy == "flipped":
        (folder / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    elif copy == "whole":
        (folder / name).write_bytes(data)


class World:
    """Sites with files on a disk, and what the ranks do to them."""

    def __init__(self, root: Path, site_of: list[int], sizes: dict[str, int], copies: dict[tuple[str, int], str]):
        numbers = {site: number for number, site in enumerate(dict.fromkeys(site_of))}  # by lowest rank
        self.site_of = [numbers[site] for site in site_of]
        self.num_sites, self.world = len(numbers), len(site_of)
        self.ranks = tuple(
            tuple(rank for rank, found in enumerate(self.site_of) if found == site) for site in range(self.num_sites)
        )
        self.folders = [root / f"site{site}" for site in range(self.num_sites)]
        self.data = {name: content(name, size) for name, size in sizes.items()}
        self.records = {
            name: FileRecord(hashlib.sha256(data).hexdigest(), len(data)) for name, data in self.data.items()
        }
        self.copies = {(name, site): copies[name, site] for name in sizes for site in range(self.num_sites)}
        for folder in self.folders:
            folder.mkdir()
        for (name, site), copy in self.copies.items():
            put(self.folders[site], name, self.data[name], copy)
        self.hashed: list[tuple[str, int, int, bool]] = []
        """Name, site, rank and outcome of each comparison, in order."""
        self.looked: Counter[tuple[str, str]] = Counter()
        """How often presence and size of a file in a folder were looked at."""
        self.fetched: list[tuple[str, int, str]] = []
        self._lock = threading.Lock()

    def writer(self, name: str) -> int:
        """The rank that writes files of this name; the small files are rank 0's."""
        match = re.fullmatch(r"__([0-9]+)_[0-9]+\.distcp", name)
        return int(match[1]) % self.world if match else 0

    def find(self, *, hashes: bool, fetches: dict[str, str] | None = None, meeting: Meeting | None = None) -> list:
        """Every rank's ``Found``."""

        def compare(folder, name, record, **options):
            problem = check_file(folder, name, record, **options)
            with self._lock:
                self.looked[name, str(folder)] += not options["hashes"]
            if options["hashes"]:
                rank = int(threading.current_thread().name.removeprefix("rank "))
                with self._lock:
                    self.hashed.append((name, self.folders.index(Path(folder)), rank, problem is None))
            return problem

        def fetch_of(rank: int):
            def fetch(name, record, into):
                assert record == self.records[name]
                with self._lock:
                    self.fetched.append((name, rank, into))
                if fetches[name] == "fails":
                    raise QuernError(f"store/{name}: no such file")
                target = Path(into, name)
                if target.is_dir():
                    target.rmdir()
                target.write_bytes(self.data[name])

            return None if fetches is None else fetch

        def call(ranks):
            mine = self.site_of[ranks.rank]
            return find_whole(
                ranks, Sites(self.ranks, mine), str(self.folders[mine]), self.records, hashes=hashes,
                fetch=fetch_of(ranks.rank),
            )  # fmt: skip

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole, "check_file", compare)
            return results(run_all(self.world, call, meeting=meeting))


@st.composite
def worlds(draw):
    site_of = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    sizes = {name: draw(st.integers(1, 40)) for name in names}
    copies = {(name, site): draw(st.sampled_from(COPIES)) for name in names for site in range(3)}
    stored = draw(st.booleans())
    fetches = {name: draw(st.sampled_from(FETCHES)) for name in names} if stored else None
    return site_of, sizes, copies, fetches, draw(st.booleans())


@pytest.mark.slow
@settings(max_examples=80)
@given(worlds())
def test_by_brute_force(case):
    site_of, sizes, copies, fetches, hashes = case
    with tempfile.TemporaryDirectory() as root:
        world = World(Path(root), site_of, sizes, copies)
        found, *others = world.find(hashes=hashes, fetches=fetches)
        assert all(other == found for other in others)
        passes = {"whole"} if hashes else {"whole", "flipped"}
        missing = []
        for name in sizes:
            states = [world.copies[name, site] for site in range(world.num_sites)]
            good = {site for site, state in enumerate(states) if state in passes}
            home = world.site_of[world.writer(name)]
            asked = [(rank, into) for fetched, rank, into in world.fetched if fetched == name]
            brought = fetches is not None and not good and fetches[name] == "brings"
            # held if some copy is whole or can be fetched; by the rank that would write it, and only then
            assert (name in found.holders) == bool(good or brought)
            assert asked == ([(world.writer(name), str(world.folders[home]))] if fetches and not good else [])
            if good:
                assert found.holders[name] in good
                assert home not in good or found.holders[name] == home
            elif brought:
                assert found.holders[name] == home
            if name in found.holders and hashes:
                assert (world.folders[found.holders[name]] / name).read_bytes() == world.data[name]
            check_problems(world, name, states, found, good, fetches)
            check_hashes(world, name, states, hashes)
            if name not in found.holders:
                missing += found.problems[name]
        assert found.missing(list(sizes)) == missing
        if hashes:  # one rank of a site looks for all
            assert world.looked == {(name, str(folder)): 1 for name in sizes for folder in world.folders}


def check_problems(world, name, states, found, good, fetches):
    """Each bad copy that is there is named once, by its path; of a file that is held those that were looked at. A file
    that nobody has is missing where its writer would have it, and nowhere else."""
    files = Counter(problem.file for problem in found.problems.get(name, []))
    paths = [str(world.folders[site] / name) for site in range(world.num_sites)]
    bad = {path for site, path in enumerate(paths) if site not in good and states[site] != "absent"}
    by_look = {path for path, state in zip(paths, states, strict=True) if state in ("short", "folder")}
    nobody = {paths[world.site_of[world.writer(name)]]} if set(states) == {"absent"} else set()
    assert {problem.file for problem in found.problems.get(name, []) if problem.what == "missing"} == nobody
    bad |= nobody
    failed = {name} if fetches and not good and fetches[name] == "fails" else set()
    assert max(files.values(), default=1) == 1
    if good:
        assert by_look <= set(files) <= bad
    else:
        assert set(files) == bad | failed
    if failed:
        assert [problem.what for problem in found.problems[name] if problem.file == name] == [
            f"store/{name}: no such file"
        ]


def check_hashes(world, name, states, hashes):
    """Only copies of the right size are read, each once, by a rank that sees them, none after a whole one."""
    compared = [(site, rank, whole) for hashed, site, rank, whole in world.hashed if hashed == name]
    sites = [site for site, _, _ in compared]
    assert len(sites) == len(set(sites))
    assert all(world.site_of[rank] == site for site, rank, _ in compared)
    assert all(states[site] in ("flipped", "whole") for site in sites)
    assert [whole for _, _, whole in compared].count(True) <= 1
    assert not any(whole for _, _, whole in compared[:-1])
    if not hashes:
        assert compared == []


def test_a_site_says_nothing_of_what_it_does_not_have(tmp_path):
    """Between a thousand nodes each of which has its own thousandth, the rest is nearly all."""
    said = {}
    for count in (3, 300):
        (root := tmp_path / str(count)).mkdir()
        sizes = {f"__0_{number}.distcp": 3 for number in range(count)}
        world = equal_world(root, [0, 1, 2], sizes, absent={(name, site) for name in sizes for site in (1, 2)})
        meeting = Meeting(world.world)
        world.find(hashes=True, meeting=meeting)
        said[count] = [[sizes[rank] for sizes in meeting.sizes] for rank in range(3)]
    assert max(said[300][0]) > 10 * max(said[3][0])
    for rank in (1, 2):
        assert max(said[300][rank]) <= max(said[3][rank]) + 2  # the folder's name is longer


def equal_world(root: Path, site_of: list[int], sizes: dict[str, int], absent: set[tuple[str, int]] = frozenset()):
    copies = {(name, site): "absent" if (name, site) in absent else "whole" for name in sizes for site in range(3)}
    return World(root, site_of, sizes, copies)


def test_the_reading_is_spread_over_the_ranks_of_a_site(tmp_path):
    """Each rank hashes at most 4/3 of the best that any assignment can do (R. L. Graham 1969, theorem 2)."""
    sizes = {f"__0_{number}.distcp": size for number, size in enumerate([70, 64, 55, 43, 31, 22, 20, 9])}
    world = equal_world(tmp_path, [0, 0, 0], sizes)
    world.find(hashes=True)
    loads = Counter({rank: 0 for rank in range(3)})
    for name, _, rank, _ in world.hashed:
        loads[rank] += sizes[name]
    best = min(
        max(sum(size for size, at in zip(sizes.values(), to, strict=True) if at == rank) for rank in range(3))
        for to in itertools.product(range(3), repeat=len(sizes))
    )
    assert sum(loads.values()) == sum(sizes.values())
    assert max(loads.values()) <= 4 / 3 * best


def test_the_files_of_a_lost_writer_are_shared_among_the_sites_that_have_them(tmp_path):
    sizes = {f"__0_{number}.distcp": 30 for number in range(6)}
    world = equal_world(tmp_path, [0, 1, 2], sizes, absent={(name, 0) for name in sizes})
    (found, *_) = world.find(hashes=True)
    assert Counter(found.holders.values()) == {1: 3, 2: 3}


def test_a_failure_that_is_no_missing_file_is_all_ranks(tmp_path):
    """A disk that cannot be written ends the search everywhere; it is not one more copy that is not there."""

    def call(ranks):
        def fetch(name, record, into):
            raise PermissionError(13, "Permission denied", into)

        sites = Sites(((0,), (1,)), ranks.rank)
        record = {"__1_0.distcp": FileRecord("0" * 64, 3)}
        with pytest.raises(QuernError) as error:
            find_whole(ranks, sites, str(tmp_path / "none"), record, hashes=True, fetch=fetch)
        return type(error.value), str(error.value)

    assert run_all(2, call) == [(QuernError, f"rank 1: {tmp_path}/none: Permission denied")] * 2


def test_what_was_put_back_is_said_once_with_what_was_wrong(tmp_path, caplog):
    world = World(
        tmp_path, [0, 1], {"__0_0.distcp": 9, "__1_0.distcp": 9},
        {("__0_0.distcp", 0): "flipped", ("__0_0.distcp", 1): "absent", ("__1_0.distcp", 0): "whole",
         ("__1_0.distcp", 1): "whole"},
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        world.find(hashes=True, fetches={"__0_0.distcp": "brings", "__1_0.distcp": "fails"})
    damaged, count = (record.getMessage() for record in caplog.records)
    assert damaged.startswith(f"{tmp_path}/site0/__0_0.distcp: expected SHA-256 ")
    assert damaged.endswith("; put back from the store")
    assert count == f"{tmp_path}/site0: 1 of 2 files came from the store"


def test_nothing_to_find():
    (found, *_) = run_all(2, lambda ranks: find_whole(ranks, Sites(((0, 1),), 0), os.devnull, {}, hashes=True))
    assert (found.holders, found.problems, found.missing([])) == ({}, {}, [])
