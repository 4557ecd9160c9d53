"""Trainers of two nodes killed (SIGKILL) between the steps of a save that keeps its files on the nodes' disks, mirrors
and uploads them, and removes old ones.

One rank a node. After each kill the next start must find the right checkpoint, bit for bit, finish what was begun, and
leave nothing behind: then every disk and the store are compared with the manifests, by ``json`` and ``hashlib`` alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import types
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quern.parallel.local import LocalRanks, RankError
from support.train import checkpoint_case as CASE
from support.waits import until

pytestmark = pytest.mark.long


WORLD = 2
LIMIT_S = 90
NAME = "step_{:08d}".format

#: Every interpreter that a struck rank starts runs this first. The mover of STRIKE_URL kills its trainer and itself in
#: the middle of the first file of STRIKE_STEP whose name has STRIKE_NAME in it.
SITECUSTOMIZE = """
import os, signal, sys
given = " ".join(sys.orig_argv)
if "tiers.mover" in given and os.environ.get("STRIKE_URL", "-") in given:
    from quern.train.checkpoint.mirror import peer_files
    from quern.train.checkpoint.store import pieces
    peer_files.CHUNK = pieces.PART_BYTES = 256
    from quern.train.checkpoint.mirror import peer_store
    from quern.train.checkpoint.store import rate, store
    pieces_left = None

    def struck(put):
        def call(self, step, name, *arguments):
            global pieces_left
            if step == int(os.environ["STRIKE_STEP"]) and os.environ["STRIKE_NAME"] in name:
                pieces_left = 3
            return put(self, step, name, *arguments)
        return call

    def take(self, n):
        global pieces_left
        if pieces_left is not None:
            pieces_left -= 1
            if pieces_left == 0:
                os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)

    for target in (store.Store, peer_store.PeerStore):
        target.put = struck(target.put)
    rate.RateLimit.take = take
"""


@dataclass(frozen=True)
class Strike:
    """Where in the save of ``step`` the ranks ``who`` are killed."""

    place: str
    who: tuple[int, ...]
    published: bool
    """Whether the checkpoint stands by then."""
    step: int = 4

    def __str__(self) -> str:
        return f"{self.place}, rank {' and '.join(map(str, self.who))}"


STRIKES = [
    Strike("staged", (1,), False),
    Strike("the other's files are in place", (0,), False),
    Strike("the other's files are in place", (1,), False),
    Strike("all files are in place", (0,), False),
    Strike("published", (0, 1), True),
    Strike("amid the mirroring of a file", (1,), True),
    Strike("amid the upload of a file", (1,), True),
    Strike("amid the upload of a file", (0,), True),
    Strike("amid the upload of the manifest", (0,), True),
]
REMOVALS = [Strike("amid the removal from a disk", (0,), True), Strike("amid the removal from a disk", (1,), True)]


# ---- in the ranks ----


def die(*arguments: Any, **options: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prepare_movers(folder: str, strike: Strike | None) -> None:
    """What the processes that this rank starts are told by their environment, before they start."""
    for name in ("STRIKE_URL", "STRIKE_STEP", "STRIKE_NAME", "PYTHONPATH"):
        os.environ.pop(name, None)
    if strike is None or ("amid the m" not in strike.place and "amid the u" not in strike.place):
        return
    import quern

    Path(folder, "site").mkdir(exist_ok=True)
    Path(folder, "site", "sitecustomize.py").write_text(SITECUSTOMIZE)
    os.environ["PYTHONPATH"] = f"{folder}/site{os.pathsep}{Path(quern.__file__).parents[1]}"
    os.environ["STRIKE_URL"] = "peer://" if "mirroring" in strike.place else f"file://{folder}/store"
    os.environ["STRIKE_STEP"] = str(strike.step)
    os.environ["STRIKE_NAME"] = "manifest.json" if "manifest" in strike.place else "distcp"


def arm(folder: str, strike: Strike) -> None:
    """Have this process die at its place."""
    from quern.train.checkpoint.format import folder as folders
    from quern.train.checkpoint.mirror.disk import Disk
    from quern.train.checkpoint.save.work import Work
    from quern.train.checkpoint.tiers.tiers import Tiers

    rank = int(os.environ["RANK"])
    name = NAME(strike.step)
    if strike.place == "staged":
        stage = Disk.stage

        def staged(self: Disk, *arguments: Any) -> None:
            stage(self, *arguments)
            die()

        Disk.stage = staged  # type: ignore[assignment]
    elif strike.place == "the other's files are in place":
        other = Path(folder, f"nvme{1 - rank}")

        def settle(self: Disk, step: int, token: str, names: Any) -> None:
            until(lambda: not list(other.glob(f"*/.{name}.{token}.tmp")), LIMIT_S / 2)
            assert list(other.glob(f"*/{name}/__{1 - rank}_0.distcp"))
            die()

        Disk.settle = settle  # type: ignore[assignment]
    elif strike.place == "all files are in place":
        Work.publish = die  # type: ignore[assignment]
    elif strike.place == "published":
        Tiers.published = die  # type: ignore[assignment]
    elif strike.place == "amid the removal from a disk":
        rmtree = folders.shutil.rmtree

        def half(path: str, **options: Any) -> None:
            if "nvme" in str(path):
                os.unlink(min(Path(path).iterdir()))
                die()
            rmtree(path, **options)

        folders.shutil = types.SimpleNamespace(rmtree=half)  # type: ignore[attr-defined]


def live(
    folder: str,
    saves: list[tuple[int, int]],
    keep_last: int,
    back_to: int | None = None,
    strike: Strike | None = None,
    bare: bool = False,
    experts: bool = False,
) -> tuple[int, int, list[str]]:
    """A trainer's life: go on, save steps with the content of a key each, remove what is old; struck in the last save.

    ``bare``: without a store, and files are not hashed before they are loaded. ``experts``: a model that has them, each
    node half of them.

    Returns the step it went on from, the key that its manifest says, and what differs from that key's numbers.
    """
    import quern.train.checkpoint.tiers.tiers as tiers
    from quern.parallel.planning.mesh import MeshPlan, build_mesh
    from quern.train.checkpoint.format.state import TrainState
    from quern.train.checkpoint.save.manager import CheckpointManager
    from quern.train.checkpoint.tiers.upload import Uploader
    from quern.train.config import CheckpointConfig

    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank)
    tiers.Uploader = partial(Uploader, retry_after_s=0.3)  # type: ignore[misc,assignment]
    mine = strike if strike is not None and rank in strike.who else None
    prepare_movers(folder, mine)
    plan, of = MeshPlan(1, WORLD, ep=WORLD if experts else 1), CASE.shape(experts=experts)
    model = CASE.laid_out(of, build_mesh(plan, "cpu"))
    state = TrainState(model, CASE.groups(model), CASE.facts(Path(folder), of, layout=plan.sizes()), {})
    CASE.fill(state, 99)
    config = CheckpointConfig(
        mode="sync", keep_last=20, verify=not bare, local=f"{folder}/nvme{{node}}",
        store=None if bare else f"file://{folder}/store", store_every=None if bare else 1,
    ).model_copy(update={"keep_last": keep_last})  # fmt: skip
    at, key, wrong = 0, 0, []
    with CheckpointManager(f"{folder}/run", config, rank, WORLD) as checkpoints:
        found = checkpoints.latest_valid() if back_to is None else checkpoints.at(back_to)
        checkpoints.tiers.resume_pending(found)
        checkpoints.tiers.finish()
        if found is not None:
            at, key = found.step, int(checkpoints.load(found.path, state).manifest.scalars["content"])
            wrong = CASE.differences(state, key)
        checkpoints.tiers.finish()
        for step, content in saves:
            if mine is not None and step == mine.step:
                arm(folder, mine)
            CASE.fill(state, content)
            position = replace(CASE.position(step, content=content), ledger_offset=0)
            checkpoints.async_save.begin(step, state, position, checkpoints.keep())
            checkpoints.async_save.wait_staged()
            outcome = checkpoints.async_save.finish()
            if outcome.error is not None:
                raise outcome.error
            checkpoints.tiers.finish()
    return at, key, wrong


# ---- beside them ----


def run(folder: Path, *arguments: Any, **options: Any) -> list[Any]:
    files = {live.__module__: live.__code__.co_filename}
    preload = ("hypothesis", "pydantic", "pytest", "yaml")
    with LocalRanks(WORLD, timeout_s=LIMIT_S, files=files, preload=preload) as ranks:
        return ranks.call(partial_live, str(folder), arguments, options)


def partial_live(folder: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return live(folder, *arguments, **options)


def killed(folder: Path, strike: Strike, *arguments: Any, **options: Any) -> None:
    with pytest.raises(RankError) as caught:
        run(folder, *arguments, **options, strike=strike)
    for rank in strike.who:
        assert "died without a word; exit code -9" in caught.value.failed[rank], caught.value


def check_whole(folder: Path, manifest: Path, *tensors: Path) -> int:
    """That all files a manifest names are there with its SHA-256, those of tensors in each of ``tensors``; the key."""
    said = json.loads(manifest.read_bytes())
    for name, record in said["files"].items():
        for place in tensors if name.endswith(".distcp") else (manifest.parent,):
            data = (place / name).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (record["size"], record["sha256"]), place / name
    return said["scalars"]["content"]


def check_tidy(folder: Path) -> tuple[dict[int, int], dict[int, int]]:
    """That every checkpoint of the run is whole on both disks, each in the store is whole there, and nothing else is
    anywhere. Returns the keys of those of the run and of the store."""
    (run_id,) = {path.name for node in (0, 1) for path in (folder / f"nvme{node}").iterdir()}
    disks = [folder / f"nvme{node}" / run_id for node in (0, 1)]
    root, store = folder / "run" / "checkpoints", folder / "store"
    names = {path.name for path in root.iterdir()} - {".lock"}
    for disk in disks:
        # the begin of a file that was fetched instead goes with its step
        assert {path.name for path in disk.iterdir()} - {f".{name}.mirror" for name in names} == names
        for name in names:
            assert {path.name for path in (disk / name).iterdir()} == {f"__{rank}_0.distcp" for rank in range(WORLD)}
    ours = {
        int(name[5:]): check_whole(folder, root / name / "manifest.json", *(disk / name for disk in disks))
        for name in names
    }
    theirs = {
        int(path.name[5:]): check_whole(folder, path / "manifest.json", path) for path in store.glob("step_*")
    }  # fmt: skip
    for place in (root, store):
        assert [path for path in place.rglob("*") if path.name.endswith((".tmp", ".part", ".replaced"))] == []
    return ours, theirs


def often(strikes):
    """Every other one in `make test-long`, the rest in `make test-exhaustive`."""
    return [
        pytest.param(strike, id=str(strike), marks=pytest.mark.exhaustive if place % 2 else ())
        for place, strike in enumerate(strikes)
    ]


@pytest.mark.parametrize("strike", often([*STRIKES, *REMOVALS]))
def test_killed_in_a_save(tmp_path, strike):
    """Keeps one checkpoint, as no config with nodes' disks may, so that the save of step 4 also removes step 2."""
    killed(tmp_path, strike, [(2, 2), (4, 4)], 1)
    at = 4 if strike.published else 2
    then = at + 3
    lives = run(tmp_path, [(then, then)], 1)
    assert lives == [(at, at, [])] * WORLD
    ours, theirs = check_tidy(tmp_path)
    assert ours == {then: then}
    assert theirs == {step: step for step in (2, at, then)}
    print(f"| {strike} | step {at} |")


@pytest.mark.parametrize("strike", STRIKES[2:3], ids=str)
def test_killed_in_a_save_of_experts_dealt_out(tmp_path, strike):
    """Their weights, moments and biases are found again, each on the disk of its own node and of the other."""
    killed(tmp_path, strike, [(2, 2), (4, 4)], 1, experts=True)
    at = 4 if strike.published else 2
    assert run(tmp_path, [(7, 7)], 1, experts=True) == [(at, at, [])] * WORLD
    ours, theirs = check_tidy(tmp_path)
    assert (ours, theirs) == ({7: 7}, {step: step for step in (2, at, 7)})


def test_the_same_step_again(tmp_path):
    """A run that goes back to step 2 saves another step 4."""
    run(tmp_path, [(2, 2), (4, 4)], 20)
    run(tmp_path, [(4, 44)], 20, back_to=2)
    assert check_tidy(tmp_path) == ({2: 2, 4: 44}, {2: 2, 4: 44})
    assert run(tmp_path, [], 20) == [(4, 44, [])] * WORLD


@pytest.mark.parametrize(
    "strike",
    [
        pytest.param(strike, id=str(strike), marks=() if strike.place == "published" else pytest.mark.exhaustive)
        for strike in STRIKES[1:]
    ],
)
def test_killed_while_a_step_is_saved_again(tmp_path, strike):
    """Until the new one stands the old one is in the store; the next start finds one of them, and no mixture."""
    run(tmp_path, [(2, 2), (4, 4)], 20)
    killed(tmp_path, strike, [(4, 44)], 20, back_to=2)
    key = 44 if strike.published else 4
    assert run(tmp_path, [], 20) == [(4, key, [])] * WORLD
    assert check_tidy(tmp_path) == ({2: 2, 4: key}, {2: 2, 4: key})
    print(f"| {strike}, of a step that stood already | {'the new' if strike.published else 'the old'} step 4 |")


@pytest.mark.parametrize("strike", often(STRIKES[1:5]))
def test_no_mixture_is_loaded_unverified(tmp_path, strike):
    """Before the first new file has an old one's place, the old checkpoint is none any more."""
    run(tmp_path, [(2, 2), (4, 4)], 20, bare=True)
    killed(tmp_path, strike, [(4, 44)], 20, back_to=2, bare=True)
    expected = (4, 44, []) if strike.published else (2, 2, [])
    assert run(tmp_path, [], 20, bare=True) == [expected] * WORLD


def test_the_copy_that_is_whole_is_moved(tmp_path):
    """One that is not is no reason to give the upload up: the partner's is."""
    run(tmp_path, [(2, 2)], 20)
    shutil.rmtree(tmp_path / "store" / NAME(2))
    (file,) = tmp_path.glob(f"nvme1/*/{NAME(2)}/__1_0.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert run(tmp_path, [], 20) == [(2, 2, [])] * WORLD
    assert check_tidy(tmp_path) == ({2: 2}, {2: 2})
