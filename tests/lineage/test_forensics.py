"""A spike that one garbled text caused is traced to it, on every layout, and what the page says is true and safe."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from quern.cli.main import app as cli_app
from quern.errors import InputError
from quern.html.pieces import show
from quern.lineage.forensics.cause import Part, _accused, find_cause, findings
from quern.lineage.forensics.explain import explain
from quern.lineage.forensics.file import StepRecord
from quern.lineage.forensics.page import render
from quern.lineage.purge.apply.pages import clean_forensics
from quern.lineage.steps import read_step
from quern.lineage.training import TrainingRun
from quern.parallel.local import LocalRanks
from support.lineage import poison_case, versions
from support.processes import files_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The data run, and the step that reads the garbled text."""
    folder = tmp_path_factory.mktemp("poison")
    return folder / "data", poison_case.write_data(folder / "data")


@pytest.fixture(scope="module")
def trained(data: tuple[Path, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    poison_case.train(str(folder), str(data[0]), {})
    return folder


def check(run: Path, step: int) -> dict[str, Any]:
    """The guard has seen the step, and what is written down leads to the text without help."""
    spikes = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert step in [line["step"] for line in spikes if line["kind"] == "spike"]
    found = explain(TrainingRun(str(run)), step)
    assert found["documents"][0]["url"] == poison_case.POISON
    assert found["documents"][0]["z"] > 3 * found["documents"][1]["z"]
    assert any(poison_case.POISON in line for line in found["findings"])
    assert poison_case.POISON in [own["url"] for own in found["sequences"][0]["documents"]]
    return found


def test_the_text_that_caused_a_spike_is_named_first(data: tuple[Path, int], trained: Path) -> None:
    found = check(trained, data[1])
    first = found["documents"][0]
    assert "loss_spike" in found["reasons"]
    assert found["decision"] == "continued"
    assert first["share"] > 0.8
    assert first["by"] == "its own targets"
    assert len(found["sequences"][0]["documents"]) > 1  # others stood in the same sequence, and are not accused
    assert len(first["text"]) == first["tokens"] - 1
    assert first["places"] == [found["sequences"][0]["place"]]
    back = next(own["command"] for own in found["commands"] if "resume.step" in own["command"])
    saved = data[1] // 40 * 40
    assert f"resume.step={saved} data_skip={data[1] + 1 - saved}" in back


@pytest.mark.long
@pytest.mark.parametrize(("layout", "dp_ranks"), [({"dp_shard": 2}, {0, 1}), ({"pp": 2}, {0})], ids=["dp2", "pp2"])
def test_on_several_ranks(
    data: tuple[Path, int], trained: Path, tmp_path: Path, layout: dict[str, int], dp_ranks: set[int]
) -> None:
    with LocalRanks(2, timeout_s=600, files=files_of(poison_case.train), preload=("pytest", "yaml")) as ranks:
        ranks.call(poison_case.train, str(tmp_path / "run"), str(data[0]), {"parallel": layout})
    found, alone = check(tmp_path / "run", data[1]), check(trained, data[1])
    assert found["documents"][0]["share"] == pytest.approx(alone["documents"][0]["share"], abs=0.05)
    assert {row["dp_rank"] for row in found["sequences"]} == dp_ranks
    assert {row["name"] for row in found["layers"]} == {row["name"] for row in alone["layers"]}


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        assert not any(name.startswith("on") for name, _ in attrs)


def test_the_page_needs_nothing_and_runs_nothing(data: tuple[Path, int], trained: Path) -> None:
    page = render(explain(TrainingRun(str(trained)), data[1]), str(trained))
    elements = _Elements()
    elements.feed(page)
    assert "script" not in elements.tags
    assert not {"img", "link", "iframe", "object"} & set(elements.tags)
    assert all(re.match(r"#|https?://", link) for link in elements.links)
    assert poison_case.POISON.replace("<", "&lt;").replace(">", "&gt;") in page
    assert page.index("poison.example") < page.index("plain.example")
    for part in ("data_skip=", "blocks.1", "gradient norm", "epoch"):
        assert part in page


def test_a_file_that_is_damaged_or_of_another_run_is_named(data: tuple[Path, int], trained: Path) -> None:
    run, path = TrainingRun(str(trained)), trained / "forensics" / f"step_{data[1]:08d}.json"
    good = path.read_text()
    record = json.loads(good)
    last = record["steps"][-1]["sequences"]

    def changed(change: Any) -> str:
        other = copy.deepcopy(record)
        change(other, other["steps"][-1]["sequences"])
        return json.dumps(other)

    broken = {
        "not valid JSON": good[:100],
        "expected what the trainer writes": "[]",
        "format: expected 1": changed(lambda r, s: r.update(format=2)),
        "sequences.loss": changed(lambda r, s: s["loss"].pop()),
        "place: expected each": changed(lambda r, s: s["place"].__setitem__(0, 5)),
        "sequences.source": changed(lambda r, s: s["source"].__setitem__(0, 9)),
        "layers": changed(lambda r, s: r["steps"][-1].pop("layers")),
        "of another run": changed(lambda r, s: s["window"].__setitem__(0, last["window"][1])),
        "seq_len: expected": changed(lambda r, s: r.update(layout={})),
        "reasons": changed(lambda r, s: r.update(reasons=[1])),
        "plain text": changed(lambda r, s: r.update(decision="\ud800")),
        "parameters: expected numbers": changed(lambda r, s: r["parameters"].update(a="x")),
        "skipped": changed(lambda r, s: r["steps"][-1].update(skipped="no")),
        "loss_z: missing": changed(lambda r, s: r["steps"][-1].pop("loss_z")),
        "loss: expected a number": changed(lambda r, s: r["steps"][-1].update(loss=math.nan)),
        "is of another run": changed(lambda r, s: [column.pop() for column in s.values()]),
        "invalid literal": changed(lambda r, s: s["window"].__setitem__(0, "x")),
    }
    try:
        for said, text in broken.items():
            path.write_text(text)
            with pytest.raises(InputError, match=said):
                explain(run, data[1])
    finally:
        path.write_text(good)
    with pytest.raises(InputError, match=f"nothing is written down of step 3: it has steps .*{data[1]}"):
        explain(run, 3)
    with pytest.raises(InputError, match="of attempt 0, expected one of attempt 4"):
        explain(run, data[1], attempt=4)


def test_without_the_data_the_rest_is_still_told(data: tuple[Path, int], trained: Path) -> None:
    moved = data[0].with_name("moved")
    data[0].rename(moved)
    try:
        found = explain(TrainingRun(str(trained)), data[1])
    finally:
        moved.rename(data[0])
    assert found["documents"] == []
    assert list(found["unknown"]) == ["poisoned/web/1"]
    assert found["sequences"][0]["z"] > 10
    assert "Not resolved" in render(found, str(trained))


def test_a_purged_text_is_shown_no_more(data: tuple[Path, int], trained: Path) -> None:
    """The page that showed it goes; one that is made anew names the document without its text."""
    before = explain(TrainingRun(str(trained)), data[1])
    text, doc_id = before["documents"][0]["text"], bytes.fromhex(before["documents"][0]["doc_id"])
    page, version = trained / "forensics" / f"step_{data[1]:08d}.html", data[0] / "tokens" / "VERSION.json"
    page.write_text(render(before, str(trained)))
    assert show(text) in page.read_text()
    deletion_set, was = pa.table({"doc_id": pa.array([doc_id], pa.binary(16))}), version.read_text()
    try:
        versions.mask(data[0], [doc_id])
        found = clean_forensics(str(data[0]), [str(trained)], deletion_set, "purge")
        assert [change.path for change in found.changes] == [str(page)]
        assert not page.exists()
        after = explain(TrainingRun(str(trained)), data[1])
        assert (after["documents"][0]["url"], after["documents"][0]["text"]) == (poison_case.POISON, None)
        page.write_text(render(after, str(trained)))
        assert show(text) not in page.read_text()
        assert not clean_forensics(str(data[0]), [str(trained)], deletion_set, "another").changes
    finally:
        version.write_text(was)


def _step(nats: list[float], targets: list[int], size: int) -> StepRecord:
    return StepRecord({"within": {"tokens": size, "place": [4], "loss": [nats], "targets": [targets]}})


def test_losses_of_a_part_of_a_sequence_add_up() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        length, size = int(rng.integers(1, 60)), int(rng.integers(1, 9))
        counted = rng.random(length) < 0.8
        nats = np.where(counted, rng.random(length), 0)
        if size > 1:  # a piece's targets are shared out evenly
            for at in range(0, length, size):
                part = counted[at : at + size]
                nats[at : at + size] = np.where(part, nats[at : at + size].sum() / max(part.sum(), 1), 0)
        starts = range(0, length, size)
        step = _step(
            [float(nats[at : at + size].sum()) for at in starts], [int(counted[at : at + size].sum()) for at in starts],
            size,
        )  # fmt: skip
        start = int(rng.integers(0, length))
        stop = start + 1
        while stop < length and counted[stop] and counted[start]:
            stop += 1
        if counted[start]:
            assert step.nats_between(4, start, stop) == pytest.approx(nats[start:stop].sum())
    assert _step([1.0], [1], 1).nats_between(5, 0, 1) is None
    assert StepRecord({"within": {"tokens": 1, "place": [4], "loss": [[None, 1.0]], "targets": [[1, 1]]}}).nats_between(
        4, 0, 2
    ) == float("inf")


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ({"embed": 0.5, "blocks.1": 3.14}, "has grown most in blocks.1: 3.1 times"),
        ({"embed": 0.0004, "blocks.1": 0.00321}, "has grown in no layer: the largest, of blocks.1, is 0.0032 times"),
    ],
)
def test_a_gradient_that_shrank_has_not_grown(ratios: dict[str, float], said: str) -> None:
    layers = [{"name": name, "ratio": ratio} for name, ratio in ratios.items()]
    found = {"cause": {"kind": ""}, "documents": [], "layers": layers, "decision": None}
    sentences = list(findings(found, np.zeros(4), np.zeros(4)))
    assert f"The gradient {said} its median of the steps before." in sentences


USUAL, FAR = 2.0, 10.0


def rewritten(run: Path, step: int, far: Any, reasons: list[str] | None = None) -> dict[str, Any]:
    """What is said of the step when every target lost :data:`USUAL`, but in the step itself :data:`FAR` those for which
    ``far(place, number of the document)`` holds; written down for ``reasons``."""
    path = run / "forensics" / f"step_{step:08d}.json"
    good = path.read_text()
    record = json.loads(good)
    record["reasons"] = reasons or record["reasons"]
    for own in record["steps"]:
        rows, parts = own["sequences"], read_step(TrainingRun(str(run)), own["step"]).documents
        length, places = record["layout"]["seq_len"], rows["place"]
        nats, counted = {place: [0.0] * length for place in places}, {place: [0] * length for place in places}
        columns = (parts.sequences, parts.numbers, parts.target_starts, parts.target_stops)
        for place, number, start, stop in zip(*(column.tolist() for column in columns), strict=True):
            loss = FAR if own is record["steps"][-1] and far(place, number) else USUAL
            nats[place][start:stop], counted[place][start:stop] = [loss] * (stop - start), [1] * (stop - start)
        rows["loss"] = [sum(nats[place]) / max(1, sum(counted[place])) for place in places]
        assert rows["targets"] == [sum(counted[place]) for place in places]
        own["within"] = {"tokens": 1, "place": places, "loss": [nats[p] for p in places],
                         "targets": [counted[p] for p in places]}  # fmt: skip
    try:
        path.write_text(json.dumps(record))
        return explain(TrainingRun(str(run)), step)
    finally:
        path.write_text(good)


def test_documents_are_named_though_half_of_the_sequences_stand_out(data: tuple[Path, int], trained: Path) -> None:
    """Two documents, each in a sequence of its own of four; every other target is as usual."""
    parts = read_step(TrainingRun(str(trained)), data[1]).documents
    sizes: dict[int, dict[int, int]] = {}
    for place, number, start, stop in zip(
        parts.sequences.tolist(), parts.numbers.tolist(), parts.target_starts.tolist(), parts.target_stops.tolist(),
        strict=True,
    ):  # fmt: skip
        sizes.setdefault(number, {})[place] = sizes.get(number, {}).get(place, 0) + stop - start
    alone = {next(iter(held)): number for number, held in sizes.items() if len(held) == 1 and sum(held.values()) > 10}
    guilty = {place: alone[place] for place in sorted(alone)[:2]}
    targets = {number: sum(sizes[number].values()) for number in guilty.values()}
    found = rewritten(trained, data[1], lambda place, number: number in targets)
    assert found["steps"][-1]["out"] == 2
    assert not found["broad"]
    assert found["cause"] == {"kind": "documents", "share": pytest.approx(1.0), "rest": pytest.approx(0.0, abs=1e-9)}
    named = {row["doc_id"]: row["share"] for row in found["documents"] if row["cause"]}
    assert sorted(named.values()) == pytest.approx(sorted(n / sum(targets.values()) for n in targets.values()))
    said = next(line for line in found["findings"] if "of the excess loss" in line)
    assert said.startswith("2 documents hold 100% of the excess loss, in 2 of 4 sequences: ")
    assert "it is the data, not the weights" in said
    assert ("from the loss alone" in said) == (not {"loss_spike", "non_finite"} & set(found["reasons"]))
    assert "from the loss alone" in _accused(
        found["cause"], [row for row in found["documents"] if row["cause"]], 4, ["grad_norm_spike"]
    )
    assert not any("that is the weights" in line for line in found["findings"])
    purge = next(own["command"] for own in found["commands"] if "lineage purge" in own["command"])
    assert purge.startswith(f"quern lineage purge {data[0]} --mode mask --doc ")
    assert all(f"--doc {doc_id}" in purge for doc_id in named)
    assert_accepted(purge)
    assert any("data_skip=" in own["command"] for own in found["commands"])

    gradient = rewritten(trained, data[1], lambda place, number: number in targets, ["grad_norm_spike"])
    assert gradient["cause"] == found["cause"]
    assert any("gradient may come from another document, and no purge is proposed" in s for s in gradient["findings"])
    assert [own for own in gradient["commands"] if "lineage purge" in own["command"]] == []
    both = rewritten(trained, data[1], lambda place, number: number in targets, ["loss_spike", "grad_norm_spike"])
    assert purge in [own["command"] for own in both["commands"]]


def assert_accepted(command: str) -> None:
    """The command line has this command with these options, and what it is given can be carried out."""
    result = CliRunner().invoke(cli_app, [*shlex.split(command)[1:], "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "nothing was done" in result.output


def test_everything_raised_alike_is_no_document_s_doing(data: tuple[Path, int], trained: Path) -> None:
    found = rewritten(trained, data[1], lambda place, number: True)
    assert found["steps"][-1]["out"] == found["steps"][-1]["sequences"] == 4
    assert found["broad"]
    assert found["cause"]["kind"] == "step"
    assert not any(row["cause"] for row in found["documents"])
    assert any("that is the weights, or all of the data at once" in line for line in found["findings"])
    assert not any("lineage purge" in own["command"] for own in found["commands"])


def parts(*rows: tuple[float, int, float]) -> list[Part]:
    """Of excess, targets and z; the n-th is document n."""
    return [Part(("run", number), excess, targets, z) for number, (excess, targets, z) in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "kind", "named", "share", "rest"),
    [
        # one document, 98 % of the excess, two of four sequences
        ([(98.0, 200, 50.0), (1.0, 100, 1.0), (1.0, 100, 1.0)], "documents", [0], 0.98, 2 / 200),
        # it has nearly the whole batch, but what is left is as usual
        ([(95.0, 370, 50.0), (0.0, 30, 0.0)], "documents", [0], 1.0, 0.0),
        # the excess shared by two
        ([(60.0, 100, 30.0), (38.0, 100, 20.0), (2.0, 200, 1.0)], "documents", [0, 1], 0.98, 2 / 200),
        # what others lose less than usual takes nothing away from the share, and adds nothing
        ([(100.0, 100, 30.0), (-90.0, 150, -20.0), (0.0, 150, 0.0)], "documents", [0], 1.0, -90 / 300),
        # all raised, by their targets: one is half of the step and has half of the excess
        ([(50.0, 200, 30.0), (25.0, 100, 20.0), (25.0, 100, 20.0)], "step", [], None, None),
        # all raised, not quite alike
        ([(30.0, 100, 30.0), (20.0, 100, 20.0), (25.0, 100, 25.0), (15.0, 100, 15.0)], "step", [], None, None),
        # nobody else is in the batch
        ([(100.0, 400, 30.0)], "unclear", [0], None, None),
        # two fill the batch, and one of them has it
        ([(90.0, 200, 30.0), (10.0, 200, 5.0)], "documents", [0], 0.9, 10 / 200),
        # one is not finite, or all
        ([(math.inf, 100, math.inf), (0.0, 300, 0.0)], "documents", [0], None, None),
        ([(math.inf, 200, math.inf), (math.inf, 200, math.inf)], "step", [], None, None),
    ],
)
def test_the_share_of_the_excess_decides(
    rows: list[tuple[float, int, float]], kind: str, named: list[int], share: float | None, rest: float | None
) -> None:
    found = find_cause(parts(*rows), 0.0, 0, broad=True)
    assert (found.kind, [number for _, number in found.keys]) == (kind, named)
    assert (found.share, found.rest) == (pytest.approx(share), pytest.approx(rest))


def test_sequences_of_unknown_documents_may_hold_the_excess() -> None:
    known = parts((40.0, 100, 20.0), (0.0, 100, 0.0))
    assert find_cause(known, 200.0, 200, broad=True).kind == "step"
    assert find_cause(known, 0.0, 200, broad=True).share == pytest.approx(1.0)


def test_a_document_that_is_the_whole_step_is_told_so() -> None:
    row = {"name": "https://a.example/", "doc_id": "ab", "targets_share": 1.0, "share": 1.0, "cause": True, "z": 9.0,
           "repeats": [{"step": 31, "what": "itself"}], "epochs": []}  # fmt: skip
    found = {"cause": {"kind": "unclear"}, "documents": [row], "layers": [], "decision": None}
    said = " ".join(findings(found, np.full(4, 9.0), np.ones(4)))
    assert "https://a.example/ has 100% of the step's targets: from this step it cannot be told" in said
    assert "https://a.example/: step 31 had read this document already." in said
