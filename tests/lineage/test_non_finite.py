"""The document in which a value was not finite first is named: held against the text of the tokens themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.errors import InputError
from quern.lineage.forensics.explain import explain
from quern.lineage.training import TrainingRun
from support.lineage import runs
from support.train import non_finite_case as CASE

pytestmark = pytest.mark.slow

MODULE = "blocks.1.ffn.w2"


def test_the_document_is_named_in_one_line(tmp_path: Path) -> None:
    data, listing = runs.write_run(tmp_path / "data", documents=300), runs.listing(documents=300)
    run = tmp_path / "run"
    left = CASE.train(str(run), [str(data / "tokens" / "web")], {}, MODULE, "forward", ord("v"))
    records = CASE.records(run)
    assert records
    for step, record in records.items():
        found = explain(TrainingRun(str(run)), step)
        first = found["first_non_finite"]
        assert len(first["documents"]) == len(record["first_non_finite"]["sequences"]) > 0
        for row, document in zip(first["sequences"], first["documents"], strict=True):
            tokens, ids = left["held"][step][row["place"]]
            own = [t for t, d in zip(tokens, ids, strict=True) if d == ids[row["position"]]]
            assert tokens[row["position"]] == ord("v")
            assert bytes(t for t in own if t < 256) in listing.texts[bytes.fromhex(document["doc_id"])].encode()
        result = CliRunner().invoke(app, ["lineage", "forensics", str(run), str(step)], env={"COLUMNS": "500"})
        assert result.exit_code == 0, result.output
        row = first["sequences"][0]
        said = f"row {row['row']} from position {row['position']} on"
        (line,) = [line for line in result.stdout.splitlines() if "Not finite first" in line]
        assert f"nan in the forward of {MODULE} on rank 0, micro-batch {first['micro_batch']}, {said}" in line
        assert (first["documents"][0]["name"] or first["documents"][0]["doc_id"])[:20] in line
    path = run / "forensics" / f"step_{step:08d}.json"
    good = path.read_text()
    for old, new in [('"place": ', '"place": 9'), (f'"{MODULE}"', '"\\u001b[2J"'), ('"rank": 0', '"rank": -1')]:
        head, tail = good.split('"first_non_finite"')
        path.write_text(head + '"first_non_finite"' + tail.replace(old, new, 1))
        with pytest.raises(InputError, match="first_non_finite: expected"):
            explain(TrainingRun(str(run)), step)
