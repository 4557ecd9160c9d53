"""A training run on an imported corpus: every token of every step leads back to the file it came from and the byte."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from quern.lineage.steps import read_step
from quern.lineage.training import TrainingRun
from quern.tokenize.exchange.ingest import ingest
from support.exchange import plain_formats as plain
from support.exchange.import_case import EOT, options
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
