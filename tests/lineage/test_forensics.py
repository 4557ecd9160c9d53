"""A spike that one garbled text caused is traced to it, on every layout, and what the page says is true and safe."""

from __future__ import annotations

import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quern.data_pipeline.report.pieces import show
from quern.errors import InputError
from quern.lineage.forensics import _findings, explain
from quern.lineage.forensics_file import StepRecord
from quern.lineage.forensics_page import render
from quern.lineage.purge.pages import clean_forensics
from quern.lineage.training import TrainingRun
from quern.parallel.local import LocalRanks
from support.lineage import poison_case, versions
from support.processes import files_of

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"parallel": {"dp_shard": 2}},
    "pp2": {"parallel": {"pp": 2}},
}


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


def on_ranks(run: str, data: str, changes: dict[str, Any]) -> None:
    poison_case.train(run, data, changes)


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
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_on_several_ranks(data: tuple[Path, int], trained: Path, tmp_path: Path, layout: str) -> None:
    with LocalRanks(2, timeout_s=600, files=files_of(on_ranks), preload=("pytest", "yaml")) as ranks:
        ranks.call(on_ranks, str(tmp_path / "run"), str(data[0]), LAYOUTS[layout])
    found, alone = check(tmp_path / "run", data[1]), check(trained, data[1])
    assert found["documents"][0]["share"] == pytest.approx(alone["documents"][0]["share"], abs=0.05)
    ranks_of = {row["dp_rank"] for row in found["sequences"]}
    assert ranks_of == ({0, 1} if layout == "dp2" else {0})
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
    condemned, was = pa.table({"doc_id": pa.array([doc_id], pa.binary(16))}), version.read_text()
    try:
        versions.mask(data[0], [doc_id])
        found = clean_forensics(str(data[0]), [str(trained)], condemned, "purge")
        assert [change.path for change in found.changes] == [str(page)]
        assert not page.exists()
        after = explain(TrainingRun(str(trained)), data[1])
        assert (after["documents"][0]["url"], after["documents"][0]["text"]) == (poison_case.POISON, None)
        page.write_text(render(after, str(trained)))
        assert show(text) not in page.read_text()
        assert not clean_forensics(str(data[0]), [str(trained)], condemned, "another").changes
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
    found = {"broad": False, "documents": [], "layers": layers, "decision": None}
    sentences = list(_findings(found, np.zeros(4), np.zeros(4)))
    assert f"The gradient {said} its median of the steps before." in sentences
