"""Files damaged at random: an import refuses them in one line, or makes a run that is whole and of ids it may have."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from quern.errors import InputError
from quern.tokenize.exchange.export import export
from quern.tokenize.exchange.ingest import ingest
from quern.tokenize.shards import ShardReader
from support.exchange.import_case import EOT, draw, options, write

ROUNDS = 25


def damage(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    kind = rng.randrange(5)
    at = rng.randrange(len(data))
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, b"\x7f" * 8, rng.randbytes(8)])
    elif kind == 3:
        data += rng.randbytes(rng.choice([1, 2, 8, 24]))
    else:
        del data[at : at + rng.choice([1, 2, 4, 8])]
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("sidecar", [False, True])
@pytest.mark.parametrize("format", ["megatron", "datatrove", "bin"])
def test_damaged_files_are_refused_or_taken_whole(ranks: str, tmp_path: Path, format: Any, sidecar: bool) -> None:
    rng = random.Random(f"{format} {sidecar}")
    write(format, tmp_path / "first", "a", draw(4, count=12))
    if sidecar:
        ingest([str(next((tmp_path / "first").glob("a.[bd]*")))], str(tmp_path / "run"), options(ranks, format))
        export(str(tmp_path / "run"), format, str(tmp_path / "in"))
        (tmp_path / "in" / "export.json").unlink()
    else:
        shutil.copytree(tmp_path / "first", tmp_path / "in")
    (data,) = (path for path in (tmp_path / "in").iterdir() if path.name.endswith((".bin", ".ds")))
    outcomes = set()
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "in", folder)
        damage(rng, rng.choice(sorted(folder.iterdir())))
        before = sorted(folder.iterdir())
        try:
            report = ingest([str(folder / data.name)], str(folder / "run"), options(ranks, format))
        except InputError as error:
            told = str(error)
            assert "\n" not in told
            assert str(folder) in told
            assert sorted(folder.iterdir()) == before
            outcomes.add("refused")
            continue
        outcomes.add("taken")
        reader = ShardReader(str(folder / "run" / "tokens" / "imported"), verify=True)
        tokens = reader.tokens(0, reader.total_tokens)
        assert reader.total_tokens == report.tokens
        assert int(tokens.max(initial=0)) <= EOT
        for shard in range(len(reader.shards)):
            for index in range(reader.shards[shard].documents):
                assert reader.document(shard, index)[-1] == EOT
        shutil.rmtree(folder)
    assert "refused" in outcomes
