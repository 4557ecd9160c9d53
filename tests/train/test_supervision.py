"""Ranks that fail are started again, not for ever; what happened is written, and given to a command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quern.cli.train import ranks
from quern.config import dump_yaml
from quern.errors import FAILING, HUNG
from quern.train.history.ledger import Ledger, read_ledger
from quern.train.history.metrics_file import when
from quern.train.processes import launch
from quern.train.supervision import beats, events
from quern.train.supervision.events import Events
from quern.train.supervision.named_ranks import named_ranks
from quern.train.supervision.restarts import Attempt, Restarts
from quern.train.supervision.supervisor import Supervisor
from support.lineage import runs
from support.programs import python
from support.train import run_case as case

RANKS = "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"


def failed(step: int | None, code: int = 1) -> Attempt:
    return Attempt(code, step=step)


@pytest.mark.parametrize(
    ("most", "attempts", "waits", "why"),
    [
        pytest.param(0, [failed(3)], [None], None, id="never"),
        pytest.param(3, [failed(3), failed(9), failed(11)], [0, 0, 0], None, id="further each time"),
        pytest.param(5, [failed(None)] * 4, [1, 2, 4, 4], None, id="twice as long, up to the longest"),
        pytest.param(9, [failed(8), failed(5), failed(6), failed(9)], [0, 1, 2, 0], None, id="until it gets further"),
        pytest.param(2, [failed(1), failed(2), failed(3)], [0, 0, None], "2 times", id="as often as it was told"),
        pytest.param(9, [failed(7), failed(7)], [0, None], "step 7 .* twice in a row", id="the same step twice"),
        pytest.param(9, [failed(7), failed(None), failed(7)], [0, 1, 2], None, id="not in a row"),
        pytest.param(9, [failed(7, code=0)], [None], None, id="complete"),
        pytest.param(9, [failed(None, code=2)], [None], None, id="bad input"),
        pytest.param(9, [failed(7, code=3)], [None], None, id="saved after a signal"),
        pytest.param(9, [Attempt(1, asked=True, step=7)], [None], None, id="asked to end, failed over it"),
        pytest.param(0, [failed(7, code=4), failed(7, code=4)], [0, 0], None, id="goes back by itself"),
        pytest.param(9, [failed(7, code=137), failed(8, code=134)], [0, 0], None, id="killed"),
    ],
)
def test_when_it_starts_again(most: int, attempts: Sequence[Attempt], waits: list[int], why: str | None) -> None:
    restarts = Restarts(most, longest_wait_s=4)
    assert [restarts.wait_s(attempt) for attempt in attempts] == waits
    assert (restarts.why is None) is (why is None)
    if why is not None:
        assert re.search(why, str(restarts.why))


def by(rank: int | None, step: int | None, code: int = 137, own: bool = True, **how: Any) -> Attempt:
    return Attempt(code, rank=rank, step=step, own=own, **how)


def doomed(rank: int) -> Attempt:
    return Attempt(FAILING, rank=rank, step=5, failing=(rank,))


@pytest.mark.parametrize(
    ("least", "attempts", "left", "why"),
    [
        pytest.param(3, [by(2, 5), by(2, 5)], [0, 1, 3], None, id="the same rank twice"),
        pytest.param(3, [by(2, None), by(2, None)], [0, 1, 3], None, id="before its first step"),
        pytest.param(3, [by(2, 5), by(1, 5)], [0, 1, 2, 3], "step 5", id="another rank in the same step"),
        pytest.param(4, [by(2, 5), by(2, 5)], [0, 1, 2, 3], "step 5", id="none may be left out"),
        pytest.param(3, [by(2, 5), by(1, 6), by(2, 7)], [0, 1, 2, 3], None, id="not in a row"),
        pytest.param(2, [by(2, 5), by(2, 6), by(2, 7), by(2, 8)], [0, 1], None, id="then the one in its place"),
        pytest.param(3, [by(2, 5), by(2, 5), by(2, 5)], [0, 1, 3], "step 5", id="as few as there may be"),
        pytest.param(1, [by(None, 5), by(None, 5)], [0, 1, 2, 3], "step 5", id="nobody knows who"),
        pytest.param(3, [doomed(1)], [0, 2, 3], None, id="whose GPU fails, at once"),
        pytest.param(
            4,
            [doomed(1)],
            [0, 1, 2, 3],
            "no GPU",
            id="whose GPU fails, and is needed",
        ),
    ],
)
def test_which_ranks_are_left_out(least: int, attempts: Sequence[Attempt], left: list[int], why: str | None) -> None:
    restarts = Restarts(9, places=[0, 1, 2, 3], least=least)
    waits = [restarts.wait_s(attempt) for attempt in attempts]
    assert restarts.places == left
    assert (waits[-1] is None) is (why is not None)
    assert why is None or why in str(restarts.why)


@pytest.mark.parametrize(
    ("attempts", "places", "spares", "taken"),
    [
        pytest.param([by(1, 5)], [0, 3, 2], [4], (1, 3), id="by itself"),
        pytest.param(
            [by(1, 5), by(1, 6), by(0, 7)], [0, 4, 2], [], None, id="and the spare one, and then there is none"
        ),
        pytest.param([by(1, 5), by(2, 5)], [0, 3, 2], [4], None, id="the same step on two places"),
        pytest.param([by(1, 5, own=False)], [0, 1, 2], [3, 4], None, id="of another's failure"),
        pytest.param([by(None, 5)], [0, 1, 2], [3, 4], None, id="nobody knows who"),
        pytest.param([by(1, 5, code=4)], [0, 1, 2], [3, 4], None, id="goes back"),
        pytest.param([by(1, 5, code=2)], [0, 1, 2], [3, 4], None, id="bad input"),
        pytest.param([by(1, 5, code=3)], [0, 1, 2], [3, 4], None, id="saved after a signal"),
        pytest.param([by(1, 5, asked=True)], [0, 1, 2], [3, 4], None, id="asked to end"),
        pytest.param([by(1, 5, adapted=True)], [0, 1, 2], [3, 4], None, id="goes on with less memory"),
        pytest.param(
            [by(1, 5), by(1, 6), by(1, 7, code=4)], [0, 4, 2], [], None, id="what was told before is not again"
        ),
    ],
)
def test_which_place_takes_over(
    attempts: Sequence[Attempt], places: list[int], spares: list[int], taken: tuple[int, int] | None
) -> None:
    restarts = Restarts(9, places=[0, 1, 2], spares=[3, 4])
    for attempt in attempts:
        restarts.wait_s(attempt)
    assert (restarts.places, restarts.spares) == (places, spares)
    assert restarts.moves == ([taken] if taken else [])


@pytest.mark.parametrize(
    ("spares", "least", "attempt", "moves", "why"),
    [
        pytest.param([4], 2, {"failing": (0, 2)}, [(0, 4), (2, None)], None, id="two GPUs that fail, one spare"),
        pytest.param([4], None, {"failing": (0, 2)}, [], "no GPU", id="and no rank can be left out"),
        pytest.param([4], 4, {"failing": (0, 2), "step": 5}, [], "no GPU", id="nor in the same step as before"),
        pytest.param([4], 4, {"failing": (2,), "rank": 2, "own": True}, [(2, 4)], None, id="as a rank tells it"),
        pytest.param([4, 5, 6], 2, {"failing": (2,), "slow": (1,)}, [(2, 4), (1, 5)], None, id="failing, then slow"),
        pytest.param([4], 2, {"rank": 3, "own": True, "slow": (1, 3)}, [(3, 4)], None, id="slow, and none is left"),
        pytest.param([], 2, {"slow": (1,)}, [], None, id="a slow one is needed"),
    ],
)
def test_several_places_are_left_at_once(
    spares: list[int], least: int | None, attempt: dict[str, Any], moves: list[Any], why: str | None
) -> None:
    restarts = Restarts(9, places=[0, 1, 2, 3], spares=spares, least=least)
    assert restarts.wait_s(Attempt(1, step=5)) == 0
    waits = restarts.wait_s(Attempt(FAILING if "failing" in attempt else 1, **{"step": 6, **attempt}))
    assert restarts.moves == moves
    assert (waits is None) is (why is not None)
    assert why is None or why in str(restarts.why)
    assert not {left for left, _ in moves} & {*restarts.places, *restarts.spares}


def test_a_place_is_left_out_only_when_no_spare_is_left() -> None:
    restarts = Restarts(9, places=[0, 1, 2], spares=[3], least=2)
    found = []
    for step in (5, 6, 7):
        restarts.wait_s(by(1, step))
        found.append([*restarts.places])
    assert found == [[0, 3, 2], [0, 3, 2], [0, 2]]


def test_the_gpu_of_a_rank_that_is_left_out_is_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "CUDA_VISIBLE_DEVICES" not in launch.environments(4)[0]
    found = launch.environments(4, [0, 1, 3])
    assert [own["RANK"] for own in found] == ["0", "1", "2"]
    assert {own["WORLD_SIZE"] for own in found} == {own["LOCAL_WORLD_SIZE"] for own in found} == {"3"}
    assert {own["CUDA_VISIBLE_DEVICES"] for own in found} == {"0,1,3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5a,2")
    assert launch.environments(3, [0, 2])[0]["CUDA_VISIBLE_DEVICES"] == "7,2"


def test_each_rank_and_each_spare_place_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Place 1 of five has failed, and place 3 has taken over rank 1."""

    def gpus(found: list[dict[str, str]]) -> list[str]:
        return [own["CUDA_VISIBLE_DEVICES"].split(",")[int(own[launch.GPU])] for own in found]

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found = launch.environments(5, [0, 3, 2], [4])
    assert [own.get("RANK") for own in found] == ["0", "1", "2", None]
    assert {own["WORLD_SIZE"] for own in found} == {"3"}
    assert gpus(found) == ["0", "3", "2", "4"]
    assert "1" not in found[0]["CUDA_VISIBLE_DEVICES"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5a,2,0,1")
    assert gpus(launch.environments(5, [0, 3, 2], [4])) == ["7", "0", "2", "1"]
    assert gpus(launch.environments(5, [0, 3, 2], [])) == ["7", "0", "2"]


def test_a_launcher_reads_in_which_step_its_ranks_are(tmp_path: Path) -> None:
    path = str(tmp_path / "beats")
    environments = beats.environments_with(path, [{**os.environ, "LOCAL_RANK": str(rank)} for rank in range(3)])
    file = open(path, "rb")  # noqa: SIM115
    assert beats.read(file.fileno()) == [None, None, None]
    code = "from quern.train.supervision import beats\nwith beats.telling() as tell:\n for step in {}: tell(step)"
    for rank, steps in ((2, [0, 1, 2**40]), (0, [5])):
        subprocess.run([sys.executable, "-c", code.format(steps)], env=environments[rank], check=True)
    os.unlink(path)
    assert beats.read(file.fileno()) == [5, None, 2**40]
    file.close()


def read_events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / events.EVENTS_FILE).read_text().splitlines()]


def test_each_event_is_a_line_and_a_call_without_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "import sys; open('heard', 'a').write(sys.argv[1] + sys.stdin.read())"
    told = Events(str(tmp_path), f"{sys.executable} -c \"{code}\" '$HOME; touch shell'")
    told.tell("failed", step=3, said="rank 1: \x1b[31mred\n")
    told.close()
    told.tell("stopped", step=None)
    told.close()
    lines = (tmp_path / events.EVENTS_FILE).read_text().splitlines(keepends=True)
    assert (tmp_path / "heard").read_text() == "".join("$HOME; touch shell" + line for line in lines)
    assert not (tmp_path / "shell").exists()
    first, second = read_events(tmp_path)
    assert (first["event"], first["step"], first["said"]) == ("failed", 3, "rank 1: \x1b[31mred\n")
    assert first["run_dir"] == str(tmp_path)
    assert (second["event"], second["step"]) == ("stopped", None)


@pytest.mark.parametrize(
    ("command", "warning"),
    [
        ("/no/such/command", "cannot be started"),
        (f"{sys.executable} -c 'raise SystemExit(7)'", "exit code 7"),
        (f"{sys.executable} -c 'import time; time.sleep(600)'", r"ended after"),
    ],
)
def test_a_command_that_fails_is_not_the_runs_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, command: str, warning: str
) -> None:
    monkeypatch.setattr(events, "LIMIT_S", 0.5 if "600" in command else 60.0)
    told = Events(str(tmp_path), command)
    told.tell("failed")
    told.close()
    told._calls[0].join(60)
    assert warning in caplog.text
    assert len(read_events(tmp_path)) == 1


@pytest.mark.parametrize("command", ["", "  ", "page 'somebody"])
def test_what_is_no_command_is_refused(tmp_path: Path, command: str) -> None:
    with pytest.raises(ValueError, match=r"on_event\n.*expected a command with its arguments"):
        case.settings(tmp_path, ["data"], on_event=command)


def test_an_error_of_a_rank_does_not_reach_the_terminal_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    ranks._tell("error: rank 1: \x1b]0;title\x07 of a\nfile")
    assert capsys.readouterr().err.rstrip("\n").isprintable()


#: A rank that begins a step for each of its arguments, and fails in the step named last, in the first FAILS attempts.
PROGRAM = """
import os, sys, time
from quern.train.supervision import beats
folder, fails, *steps = sys.argv[1:]
mine = os.path.join(folder, "started-" + os.environ["RANK"])
before = os.path.getsize(mine) if os.path.exists(mine) else 0
open(mine, "a").write(".")
with beats.telling() as tell:
    for step in steps[before].split(","):
        tell(int(step) + (os.environ["RANK"] == "0"))
    if before < int(fails):
        while os.environ["RANK"] == "0":
            time.sleep(1)
        os.kill(os.getpid(), 9)
"""


def supervise(tmp_path: Path, most: int, fails: int, *steps: str) -> tuple[Attempt, list[str], Restarts]:
    said: list[str] = []
    restarts = Restarts(most, first_wait_s=0.01)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(fails), *steps]
    told = Events(str(tmp_path), None)
    return Supervisor(str(tmp_path), command, 2, restarts, told, said.append).run(), said, restarts


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.train.processes.launch.GRACE_S", 0.1)


def test_a_rank_whose_gpu_fails_is_left_out_at_once(tmp_path: Path) -> None:
    """The others wait to be ended."""
    code = "import os, sys, time\nif os.environ['WORLD_SIZE'] == '2':\n"
    code += " time.sleep(600 * (os.environ['RANK'] == '0'))\n sys.exit(6)"
    said: list[str] = []
    restarts, told = Restarts(3, least=1), Events(str(tmp_path), None)
    attempt = Supervisor(str(tmp_path), [sys.executable, "-c", code], 2, restarts, told, said.append).run()
    assert (attempt.code, restarts.places) == (0, [0])
    assert "rank 1 of 2 has a GPU that fails: it goes on without (--min-nproc)" in said
    assert [(row["code"], row["rank"]) for row in read_events(tmp_path)] == [(6, 1)]


def test_ranks_are_started_again_until_they_end_well(tmp_path: Path) -> None:
    attempt, said, restarts = supervise(tmp_path, 3, 2, "0,1", "0,1,2,3", "0,1")
    assert (attempt.code, restarts.done, restarts.why) == (0, 2, None)
    assert [line.partition(";")[0] for line in said[::2]] == ["error: rank 1 was killed by signal 9 (SIGKILL)"] * 2
    assert [(row["event"], row["rank"], row["step"], row["restarts"]) for row in read_events(tmp_path)] == [
        ("failed", 1, 1, 1), ("failed", 1, 3, 2),
    ]  # fmt: skip


def test_all_whose_gpus_fail_are_left_though_those_of_sound_ones_end_with_the_same_code(tmp_path: Path) -> None:
    """They have waited to be ended, or one of them is seen before a rank that hangs in its driver."""
    said, told = list[str](), Events(str(tmp_path), None)
    code = """
import os, sys
from quern.train.history.ledger import Ledger
if os.environ["WORLD_SIZE"] == "4" and os.environ["RANK"] == "0":
    with Ledger(sys.argv[1] + "/ledger.jsonl") as ledger:
        ledger.append("stopped", step=7, signal="two GPUs", failing=[1, 3])
sys.exit(6 * (os.environ["WORLD_SIZE"] == "4"))
"""
    restarts, command = Restarts(2, first_wait_s=0.01, least=2), [sys.executable, "-c", code, str(tmp_path)]
    assert Supervisor(str(tmp_path), command, 4, restarts, told, said.append).run().code == 0
    assert restarts.places == [0, 2]
    assert [line for line in said if "place" in line or "rank" in line] == [
        "rank 1 of 4 has a GPU that fails: it goes on without (--min-nproc)",
        "rank 3 of 4 has a GPU that fails: it goes on without (--min-nproc)",
    ]


def test_who_is_named_since_a_start(tmp_path: Path) -> None:
    assert named_ranks(str(tmp_path), 0.0) == ((), ())
    with Ledger(tmp_path / "ledger.jsonl") as ledger:
        ledger.append("straggler", step=49, what="rank 5 on a", ranks=[5], slower=0.4)
        ledger.append("stopped", step=50, signal="a GPU", failing=[2])
        while (began := time.time()) - 0.002 < when(read_ledger(tmp_path / "ledger.jsonl")[-1]):
            time.sleep(0.001)
        assert named_ranks(str(tmp_path), began) == ((), ())
        for what, which, slower in (("rank 1 on a", [1], 0.3), ("b", [2, 3], 0.5), ("rank 1 on a", [1], 0.0)):
            ledger.append("straggler", step=99, what=what, ranks=which, slower=slower)
        assert named_ranks(str(tmp_path), began) == ((), (2, 3))
        ledger.append("stopped", step=100, signal="GPUs", failing=[0, 3])
        assert named_ranks(str(tmp_path), began) == ((0, 3), (2, 3))
    assert named_ranks(str(tmp_path), 0.0) == ((0, 3), (2, 3, 5))
    (tmp_path / "ledger.jsonl").write_text("{no line}\n{}\n")
    assert named_ranks(str(tmp_path), 0.0) == ((), ())


@pytest.mark.parametrize("told", [HUNG, FAILING])
def test_a_hang_or_a_failing_gpu_is_told_whatever_the_others_end_with(
    told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail of the end of the rank that has told of it, and may be seen first."""
    monkeypatch.setattr("quern.train.processes.launch.GRACE_S", 60.0)
    code = f"import os, time; rank = int(os.environ['RANK']); time.sleep(rank); os._exit((1, {told})[rank])"
    own = Events(str(tmp_path), None)
    ended = Supervisor(str(tmp_path), [sys.executable, "-c", code], 2, Restarts(0), own, lambda line: None).run()
    assert (ended.code, ended.failing) == (told, (1,) if told == FAILING else ())


def test_the_same_step_twice_in_a_row_is_the_end(tmp_path: Path) -> None:
    attempt, said, restarts = supervise(tmp_path, 9, 9, "4,5", "3,4,5", "5")
    assert (attempt.code, attempt.step, restarts.done) == (137, 5, 1)
    assert restarts.why == "step 5 has ended the run twice in a row"
    assert read_events(tmp_path)[-1]["why_not"] == restarts.why
    assert "in step 5" in said[1]


def test_a_signal_in_the_wait_for_a_start_is_the_end(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from quern.train.supervision.events import Events\n"
        "from quern.train.supervision.restarts import Restarts\n"
        "from quern.train.supervision.supervisor import Supervisor\n"
        "restarts, told = Restarts(9, first_wait_s=600.0), Events(sys.argv[1], None)\n"
        "Supervisor(sys.argv[1], [sys.executable, '-c', 'raise SystemExit(1)'], 1, restarts, told, str).run()\n"
        "print(restarts.done)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    while not (tmp_path / events.EVENTS_FILE).exists():  # written right before the wait
        time.sleep(0.05)
        assert process.poll() is None
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    assert process.communicate()[0] == b"1\n"
    assert len(read_events(tmp_path)) == 1


#: ``quern.train``, of which rank 1 is killed in step 5 while the file named first is there, or for ever.
TRAINER = """
import os, sys
from quern.train import __main__ as program
from quern.train.trainer import Trainer
from quern.train.processes import launch

plain = Trainer.clip

def clip(self, step):
    if step == 5 and self.ranks.rank == 1 and (sys.argv[1] == "ever" or os.path.exists(sys.argv[1])):
        if sys.argv[1] != "ever":
            os.unlink(sys.argv[1])
        os.kill(os.getpid(), 9)
    return plain(self, step)

Trainer.clip = clip
launch.end_with_launcher()
program.leave(program.main(sys.argv[2:]))
"""
LAUNCHER = """
import sys
from quern.cli.train import ranks
from quern.train.init_from import load_run_config

once, program, config = sys.argv[1:]
ranks.module = lambda *_: [sys.executable, program, once, config]
sys.exit(ranks.supervise(load_run_config(config, ()), config, [], 2, 3))
"""


def train(tmp_path: Path, name: str, paths: list[str], fault: str) -> tuple[Any, Path]:
    run = tmp_path / name
    config = case.settings(run, paths, global_batch=4, micro_batch=1, checkpoint={"interval": 2})
    (tmp_path / f"{name}.yaml").write_text(dump_yaml(config))
    (tmp_path / "program.py").write_text(TRAINER)
    command = [python(), "-c", LAUNCHER, fault, str(tmp_path / "program.py"), str(tmp_path / f"{name}.yaml")]
    environment = {key: value for key, value in os.environ.items() if key not in RANKS} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False), run


@pytest.mark.long
def test_a_run_goes_on_after_a_kill_to_the_same_weights(tmp_path: Path) -> None:
    paths = case.write_corpus(tmp_path / "data")
    (tmp_path / "once").touch()
    whole, plain = train(tmp_path, "plain", paths, str(tmp_path / "none"))
    killed, again = train(tmp_path, "again", paths, str(tmp_path / "once"))
    assert (whole.returncode, killed.returncode) == (0, 0), killed.stderr
    assert "failed in step 5: started again at once (restart 1 of 3)" in killed.stderr
    files = sorted((plain / "checkpoints" / f"step_{case.STEPS:08d}").glob("*.distcp"))
    assert files
    for file in files:
        assert file.read_bytes() == (again / file.relative_to(plain)).read_bytes()


@pytest.mark.long
def test_a_step_that_ends_the_run_twice_is_named_with_its_documents(tmp_path: Path) -> None:
    data = runs.write_run(tmp_path / "data", seed=4, documents=240, files=6)
    paths = [str(path) for path in sorted((data / "tokens").iterdir()) if path.is_dir() and path.suffix != ".val"]
    done, run = train(tmp_path, "run", paths, "ever")
    assert done.returncode == 137, done.stderr
    lines = done.stderr.splitlines()
    assert "not started again: step 5 has ended the run twice in a row" in lines
    assert lines[-1].startswith("step 5 read ")
    assert lines[-1].endswith(f"(quern lineage step {run} 5 --attempt 1)")
    urls = {row["url"] for row in runs.listing(seed=4, documents=240, files=6).rows if row["url"]}
    assert any(url in lines[-1] for url in urls)
