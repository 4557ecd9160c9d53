"""A training run on an imported corpus: every token of every step leads back to the file it came from and the byte."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from quern.lineage.steps import read_step
from quern.lineage.training import TrainingRun
from quern.tokenize.exchange.ingest import ingest
from support.exchange import plain_formats as plain
from support.exchange.import_case import EOT, draw, options, write
from support.train.run_case import live, settings

pytestmark = pytest.mark.slow


def test_every_token_of_every_step_leads_to_its_byte(ranks: str, tmp_path: Path) -> None:
    """One file without EOTs in Megatron's int32, of documents of several sequences; one raw stream, cut behind EOTs."""
    rng = random.Random(11)

    def text(length: int) -> list[int]:
        return [rng.randrange(256) for _ in range(length)]

    documents = [[text(rng.randint(1, 30)) for _ in range(rng.randint(1, 3))] for _ in range(60)]
    plain.write_megatron(tmp_path / "m", documents, code=4, gap=b"\1\0\0\0")
    stream = [token for _ in range(70) for token in (*text(rng.randint(0, 40)), EOT)]
    (tmp_path / "raw.bin").write_bytes(plain.pack("uint16", stream))
    ingest([str(tmp_path / "m.idx")], str(tmp_path / "one"), options(ranks, "megatron", source="m"))
    ingest([str(tmp_path / "raw.bin")], str(tmp_path / "two"), options(ranks, "bin", shard_tokens=500))
    paths = [str(tmp_path / "one/tokens/m"), str(tmp_path / "two/tokens/imported")]
    config = settings(tmp_path / "train", paths, steps=4)
    left = live(config)
    assert left.complete

    files = {
        str(tmp_path / "m.bin"): np.frombuffer((tmp_path / "m.bin").read_bytes(), "<i4"),
        str(tmp_path / "raw.bin"): np.frombuffer((tmp_path / "raw.bin").read_bytes(), "<u2"),
    }
    run = TrainingRun(str(tmp_path / "train"))
    walked = set()
    for step in range(4):
        read = read_step(run, step)
        rows = left.tokens[read.data_step]
        covered = {place: np.zeros(len(row), int) for place, row in rows.items()}
        parts = read.documents
        for m in range(len(parts.numbers)):
            lineage, _ = read.streams[int(parts.sources[m])]
            row = lineage.verdict(int(parts.numbers[m]))
            foreign = files[row["source_file"]]
            size = foreign.dtype.itemsize
            first = row["record_offset"] // size
            document = foreign[first : first + row["record_length"] // size].tolist()
            own = [*document, EOT] if row["source"] == "m" else document
            assert len(own) == parts.lengths[m]
            place, start, stop = (int(getattr(parts, n)[m]) for n in ("sequences", "input_starts", "input_stops"))
            covered[place][start:stop] += 1
            inputs = rows[place][start:stop]
            # a document that began in the window before goes on at its head
            assert any(inputs == own[at : at + len(inputs)] for at in range(len(own) - len(inputs) + 1))
            assert start == 0 or inputs == own[: len(inputs)]
            walked.add((row["source_file"], row["record_offset"]))
        assert all((counts == 1).all() for counts in covered.values())
    assert {path for path, _ in walked} == files.keys()
    assert len(walked) > 50


def test_sources_of_one_name_and_documents_without_url_are_told_apart(ranks: str, tmp_path: Path) -> None:
    paths = []
    for seed, name in enumerate(("wiki", "code")):
        file = write("bin", tmp_path / "in", name, draw(seed, 60))
        ingest([str(file)], str(tmp_path / name), options(ranks, "bin"))
        paths.append(str(tmp_path / name / "tokens" / "imported"))
    live(settings(tmp_path / "train", paths, steps=2, schedule={"warmup": 1}, forensics={"steps": [1]}))

    def told(*arguments: str) -> list[str]:
        result = CliRunner().invoke(app, ["lineage", *arguments])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    lines = told("step", str(tmp_path / "train"), "1")
    assert "no url" not in "\n".join(lines)
    run = TrainingRun(str(tmp_path / "train"))
    read, seen = read_step(run, 1), set()
    for place in range(read.global_batch):
        source = int(read.sources_G[place])
        lineage, stream = read.streams[source]
        at = next(n for n, line in enumerate(lines) if line.startswith(f"sequence {place} "))
        assert f"  {stream.path}, epoch 0, " in lines[at]
        file, seen = Path(lineage.run).name, seen | {source}
        for own, number in enumerate(read.documents.numbers[read.documents.sequences == place].tolist(), 1):
            offset = lineage.verdict(number)["record_offset"]
            assert lines[at + own].endswith(f"  {file}.bin at byte {offset:,}")
    assert seen == {0, 1}

    text = "\n".join(told("forensics", str(tmp_path / "train"), "1"))
    assert "no url" not in text
    assert all(f" of {path}" in text or f"; {path} epoch 0" in text for path in paths)
    assert "at byte " in (tmp_path / "train" / "forensics" / "step_00000001.html").read_text()
