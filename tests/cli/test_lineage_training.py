"""``quern lineage step`` and ``exposure`` over a run that was trained, skipped a step, died, and was rolled back."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from quern.cli.lineage.exposure import exposure
from quern.cli.lineage.step import step
from quern.lineage.store import IndexedRun
from support.lineage import runs
from support.train import run_case as case

pytestmark = pytest.mark.slow

app = typer.Typer()
app.command("step")(step)
app.command("exposure")(exposure)

LENGTH = 32


def call(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def answer(json_of: Callable[..., Any]) -> Callable[..., Any]:
    """What a command says as JSON, and nothing else on stdout."""
    return partial(json_of, call)


class Trained:
    """A data run with its verdicts, and a training run over it, with what its loop took."""

    def __init__(self, folder: Path) -> None:
        self.data, self.run = folder / "data", folder / "train"
        runs.write_run(self.data, documents=120, files=2)
        self.listing = runs.listing(documents=120, files=2)
        paths = [str(self.data / "tokens" / name) for name in ("web", "text")]
        make = lambda **changes: case.settings(self.run, paths, **({"checkpoint": {"interval": 2}} | changes))  # noqa: E731
        nan = lambda data_step: math.nan if data_step == 3 else 1.0  # noqa: E731
        self.lives = [
            case.live(make(steps=8), factor=nan, kill_at=7),
            case.live(make(steps=8, resume={"step": 4}, data_skip=2)),
        ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained"))


def documents_of(trained: Trained, source: str, window: int) -> Counter[tuple[str, int, int]]:
    """(doc_id, input position, its document's token) of a window, by the rows of the spans alone."""
    found: Counter[tuple[str, int, int]] = Counter()
    for span in trained.listing.spans[source]:
        for position in range(LENGTH):
            token = window * LENGTH + position
            if span["start"] <= token < span["start"] + span["length"]:
                found[span["doc_id"].hex(), position, token - span["start"]] += 1
    return found


def test_a_step_is_what_the_loop_took(trained: Trained, answer: Callable[..., Any]) -> None:
    taken = {(0, t): (t, trained.lives[0]) for t in range(7)} | {(1, t): (t + 2, trained.lives[1]) for t in range(4, 8)}
    for (attempt, t), (data, left) in taken.items():
        told = answer("step", trained.run, t, "--attempt", attempt)
        assert (told["step"], told["data_step"], told["attempt"], told["applied"]) == (t, data, attempt, data != 3)
        state = "surviving" if (attempt == 0) == (t < 4) else "abandoned"
        # the first life was killed in step 7, and its last checkpoint is after 6 steps
        assert told["state"] == (state if (attempt, t) != (0, 6) else "unproven")
        assert (told["dp"], told["micro_batch_size"], told["seq_len"]) == (1, 4, LENGTH)
        assert [row["place"] for row in told["sequences"]] == list(range(8))
        for row, (place, source, epoch, window) in zip(told["sequences"], left.samples[data], strict=True):
            assert (row["place"], row["epoch"], row["window"]) == (place, epoch, window)
            name = ("web", "text")[source]
            assert row["source"].split("/")[1] == name
            assert (row["rank"], row["micro_batch"], row["row"]) == (0, place // 4, place % 4)
            found: Counter[tuple[str, int, int]] = Counter()
            for document in row["documents"]:
                first, stop = document["inputs"] or (0, 0)
                start = document["span"]["start"] - window * LENGTH
                found.update((document["doc_id"], position, position - start) for position in range(first, stop))
            assert found == documents_of(trained, name, window)
    assert answer("step", trained.run, 5)["attempt"] == 1
    assert answer("step", trained.run, 3)["attempt"] == 0


def test_every_row_of_step_is_an_exposure_and_the_other_way_round(trained: Trained, answer: Callable[..., Any]) -> None:
    taken = [(0, t) for t in range(6)] + [(1, t) for t in range(4, 8)]
    by_step, by_document = set(), set()
    names = set()
    for attempt, t in taken:
        for row in answer("step", trained.run, t, "--attempt", attempt)["sequences"]:
            for document in row["documents"]:
                names.add(document["doc_id"])
                key = (attempt, t, row["place"], document["doc_id"], str(document["inputs"]), str(document["targets"]))
                by_step.add(key)
    for name in names:
        told = answer("exposure", trained.run, "--doc", name, "--all", "--limit", 10_000)
        assert told["rows_left_out"] == 0
        for row in told["rows"]:
            key = (row["attempt"], row["step"], row["sequence"], row["doc_id"], str(row["inputs"]), str(row["targets"]))
            by_document.add(key)
            assert row["doc_id"] == name
            assert row["surviving"] == ((row["attempt"] == 0) == (row["step"] < 4))
            assert row["applied"] == (row["data_step"] != 3)
    assert by_document == by_step


def test_checkpoints_that_saw_a_document(trained: Trained, answer: Callable[..., Any]) -> None:
    steps = sorted(int(path.name[5:]) for path in (trained.run / "checkpoints").glob("step_*"))
    mixed = 0
    lineage = IndexedRun(str(trained.data))
    for doc_id in lineage.documents(list(range(lineage.num_documents))).doc_ids:
        told = answer("exposure", trained.run, "--doc", doc_id.hex(), "--all", "--limit", 10_000)
        real = {(row["attempt"], row["step"]) for row in told["rows"] if row["applied"] and not row["purged"]}
        saw = {row["step"]: row["saw"] for row in told["checkpoints"]}
        assert sorted(saw) == steps
        for checkpoint in told["checkpoints"]:
            # step 6 was saved by both lives, and the second one's stands
            branch = {(0, t) for t in range(min(4, checkpoint["step"]))}
            branch |= {(1, t) for t in range(4, checkpoint["step"])}
            assert checkpoint["abandoned"] is None
            assert checkpoint["saw"] == bool(real & branch)
            assert checkpoint["first_step"] == min((t for _, t in real & branch), default=None)
        clean = [number for number in steps if not saw[number]]
        assert (told["last_clean"] or {"step": None})["step"] == (max(clean) if clean else None)
        assert (told["first_step"] is None) == (not any(row["surviving"] and row["applied"] for row in told["rows"]))
        mixed += bool(clean) and any(saw.values())
    assert mixed > 5


def test_a_domain_is_all_of_its_documents(trained: Trained, answer: Callable[..., Any]) -> None:
    lineage = IndexedRun(str(trained.data))
    numbers = lineage.find(domain="example.com").tolist()
    told = answer("exposure", trained.run, "--domain", "example.com", "--limit", 3)
    assert told["documents"] == len(numbers) > 10
    alone = [
        answer("exposure", trained.run, "--doc", doc_id.hex(), "--limit", 0)
        for doc_id in lineage.documents(numbers).doc_ids
    ]
    assert told["exposures"] == sum(row["exposures"] for row in alone) > 5
    assert len(told["rows"]) == 3
    assert told["rows_left_out"] == told["exposures"] - 3
    by_step: Counter[int] = Counter()
    for row in alone:
        by_step.update({one["step"]: one["exposures"] for one in row["steps"]})
        assert row["rows"] == []
    assert {row["step"]: row["exposures"] for row in told["steps"]} == by_step
    assert [row["step"] for row in told["rows"]] == sorted(by_step.elements())[:3]


def test_what_the_terminal_is_told(trained: Trained) -> None:
    text = call("step", trained.run, 3).stdout
    assert "step 3, attempt 0 (start, surviving, its update skipped)" in text
    assert "sequence 0  rank 0, micro-batch 0" in text
    assert "attempt 0 (start, abandoned)" in call("step", trained.run, 5, "--attempt", 0).stdout
    text = call("step", trained.run, 6, "--attempt", 0).stdout
    assert "nobody knows whether it got that far" in text
    text = call("exposure", trained.run, "--domain", "example.com", "--all").stdout
    assert "documents " in text
    assert "last clean " in text
    assert "not proven   attempt 0 from step 6 on" in text
    assert "\x1b" not in text


def test_refusals(trained: Trained, answer: Callable[..., Any], tmp_path: Path) -> None:
    assert "expected one of --url, --domain, --doc and --match, got 0" in call("exposure", trained.run, code=2).output
    both = call("exposure", trained.run, "--url", "http://a/", "--doc", "0" * 32, code=2).output
    assert "got 2" in both
    gone = call("exposure", trained.run, "--url", "http://nowhere.example/\x1b[31m", code=2).output
    assert "has no document with url http://nowhere.example/\\x1b[31m" in gone
    bare = call("exposure", trained.run, "--url", "nowhere.example/x", code=2).output
    assert "has no document with url nowhere.example/x (it is no http or https URL)" in bare
    assert "expected 32 hex digits" in call("exposure", trained.run, "--doc", "xyz", code=2).output
    assert "step 8 was not read: 8 steps are complete" in call("step", trained.run, 8, code=2).output
    assert "rank: expected 0 to 0, got 1" in call("step", trained.run, 0, "--rank", 1, code=2).output
    assert "expected a training run" in call("step", tmp_path, 0, code=2).output
    shutil.copytree(trained.run, tmp_path / "copy")
    for path in [path for path in (tmp_path / "copy").iterdir() if path.suffix in (".jsonl", ".json", ".yaml")]:
        path.write_text(path.read_text().replace(str(trained.data), str(tmp_path / "gone")))
    assert "gone" in call("exposure", tmp_path / "copy", "--doc", "0" * 32, code=2).output
    told = answer("step", tmp_path / "copy", 0)
    assert len(told["unknown_sources"]) > 0
    assert all(row["documents"] == [] for row in told["sequences"])


def test_the_documents_that_match_a_benchmark(trained: Trained, answer: Callable[..., Any], tmp_path: Path) -> None:
    lineage = IndexedRun(str(trained.data))
    long = max(
        (span for span in trained.listing.spans["web"] if not span["purged"]),
        key=lambda span: len(trained.listing.texts[span["doc_id"]].split()),
    )
    text = trained.listing.texts[long["doc_id"]]
    bench = tmp_path / "bench.jsonl"
    bench.write_text(json.dumps({"id": "1", "text": text}) + "\n")
    told = answer("exposure", trained.run, "--match", bench, "--limit", 10_000)
    assert told["documents"] >= 1
    assert "only the matched spans count" in call("exposure", trained.run, "--match", bench).stdout
    assert "only the matched spans count" not in call("exposure", trained.run, "--domain", "example.com").stdout
    assert long["doc_id"].hex() in {row["doc_id"] for row in told["rows"]} or told["exposures"] == 0
    whole = answer("exposure", trained.run, "--doc", long["doc_id"].hex(), "--limit", 10_000)
    steps = {(row["step"], row["sequence"]) for row in told["rows"] if row["doc_id"] == long["doc_id"].hex()}
    assert steps <= {(row["step"], row["sequence"]) for row in whole["rows"]}
    assert lineage.num_documents == 120


def test_a_result_of_match_that_was_kept_says_what_looking_again_says(
    trained: Trained, answer: Callable[..., Any], tmp_path: Path
) -> None:
    from quern.lineage.match import match

    bench, kept = tmp_path / "bench.jsonl", tmp_path / "kept"
    texts = [trained.listing.texts[span["doc_id"]] for span in trained.listing.spans["web"] if not span["purged"]]
    bench.write_text(json.dumps({"text": max(texts, key=lambda text: len(text.split()))}) + "\n")
    found = match(IndexedRun(str(trained.data)), str(bench))
    assert len(found) > 0
    found.save(str(kept))
    told = [answer("exposure", trained.run, "--match", path, "--limit", 10_000) for path in (bench, kept)]
    for own in told:
        del own["asked"]
    assert told[0] == told[1]
    replace(found, run_id="other").save(str(kept))
    refused = call("exposure", trained.run, "--match", kept, code=2)
    assert f"{kept}: is of data run other, and no source that {trained.run} reads is of it" in refused.output
    kept.write_bytes(b"PAR1 and nothing more")
    assert (
        "expected a result of quern lineage match --out"
        in call("exposure", trained.run, "--match", kept, code=2).output
    )


@pytest.mark.long
def test_checkpoints_that_only_the_store_has(tmp_path: Path, answer: Callable[..., Any], trained: Trained) -> None:
    paths = [str(trained.data / "tokens" / name) for name in ("web", "text")]
    stored = {"interval": 2, "mode": "thread", "store": f"file://{tmp_path}/store", "store_every": 1}
    case.live(case.settings(tmp_path / "run", paths, steps=4, checkpoint=stored))
    span = max(trained.listing.spans["web"], key=lambda span: span["length"])
    asked = ("exposure", tmp_path / "run", "--doc", span["doc_id"].hex())
    here = answer(*asked)
    assert [row["step"] for row in here["checkpoints"]] == [2, 4]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000002")
    assert [row["step"] for row in answer(*asked)["checkpoints"]] == [4]
    both = answer(*asked, "--store")
    assert [(row["step"], row["saw"]) for row in both["checkpoints"]] == [
        (row["step"], row["saw"]) for row in here["checkpoints"]
    ]
    assert f"{tmp_path}/store" in both["checkpoints"][0]["path"]
