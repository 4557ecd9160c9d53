"""What stands at a position of a shard."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from quern.data_pipeline.execution.engine import InProcess
from quern.errors import InputError
from quern.tokenize.encoding import TokenizeConfig, load_encoding
from quern.tokenize.inspect import inspect
from quern.tokenize.writing.run import run


@pytest.fixture
def corpus(make_run: Callable, make_doc: type, tmp_path: Path, tiny_ranks: str) -> tuple[Path, list]:
    rng = random.Random(1)
    docs = [make_doc(rng.randbytes(16), f"the {n}th one in a row é" * (n % 3)) for n in range(30)]
    names = make_run(tmp_path, {("web", "a"): docs[:17], ("web", "b"): docs[17:]})
    config = TokenizeConfig(encoding="own", ranks=tiny_ranks, shard_tokens=200, validation=0.3)
    run(str(tmp_path), names, config, 0, InProcess(), str(tmp_path / ".work"))
    return tmp_path, docs


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["web", "web.val"])
def test_every_position_names_its_document_and_its_page(
    corpus: tuple[Path, list], tiny_ranks: str, stream: str
) -> None:
    run_dir, docs = corpus
    encoding = load_encoding("own", tiny_ranks)
    by_id = {doc.doc_id.hex(): (number, doc) for number, doc in enumerate(docs)}
    manifest = json.loads((run_dir / "tokens" / stream / "manifest.json").read_text())
    assert manifest["tokens"] > 100
    for info in manifest["shards"]:
        path = run_dir / "tokens" / stream / info["bin"]
        ids = [int.from_bytes(path.read_bytes()[i : i + 2], "little") for i in range(0, 2 * info["tokens"], 2)]
        for at in range(0, info["tokens"], 5):
            found = inspect(str(path), at, context=4)
            number, doc = by_id[found.doc_id]
            tokens = [*encoding.core.encode_ordinary(doc.text), encoding.eot_id]
            assert found.token == ids[at] == tokens[found.position]
            assert (found.start, found.length) == (at - found.position, len(tokens))
            assert found.is_eot == (found.position == len(tokens) - 1)
            assert found.before == encoding.core.decode(ids[max(0, at - 4) : at])
            assert found.after == encoding.core.decode(ids[at + 1 : at + 5])
            partition, row = ("a", number) if number < 17 else ("b", number - 17)
            assert found.page is not None
            assert found.page["url"] == f"https://example.org/{found.doc_id}"
            assert found.page["source_file"] == f"/in/{partition}.warc.gz"
            assert (found.page["record_offset"], found.page["record_length"]) == (100 * row, 90)
            assert found.page["fetched_at"] == f"2024-02-29T12:{row:02}:00+00:00"


def test_the_answer_is_plain_data(corpus: tuple[Path, list]) -> None:
    found = inspect(str(corpus[0] / "tokens" / "web" / "shard_00000.bin"), 0)
    assert json.loads(json.dumps(asdict(found))) == asdict(found)


def test_tokens_without_their_run_still_name_the_document(corpus: tuple[Path, list], tmp_path: Path) -> None:
    for path in (corpus[0] / "verdicts" / "web").iterdir():
        path.unlink()
    found = inspect(str(corpus[0] / "tokens" / "web" / "shard_00000.bin"), 3)
    assert found.page is None
    assert len(found.doc_id) == 32


@pytest.mark.parametrize("at", [-1, 10_000])
def test_a_position_outside_is_refused(corpus: tuple[Path, list], at: int) -> None:
    with pytest.raises(InputError, match=r"expected a position from 0 to"):
        inspect(str(corpus[0] / "tokens" / "web" / "shard_00000.bin"), at)


def test_a_file_outside_the_version_is_refused(corpus: tuple[Path, list]) -> None:
    path = corpus[0] / "tokens" / "web" / "shard_00099.bin"
    path.write_bytes(b"\0\0")
    with pytest.raises(InputError, match=r"lists no such shard"):
        inspect(str(path), 0)


def test_a_folder_is_refused_as_one(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        inspect(str(tmp_path), 0)
    assert str(caught.value) == (
        f"{tmp_path}: expected a file of a shard, such as RUN/tokens/SOURCE/shard_00000.bin, got a folder"
    )


def test_a_shard_on_another_store_is_refused_by_its_whole_name() -> None:
    with pytest.raises(InputError, match=r"^memory://run/tokens/web/shard_00000\.bin: shards are memory-mapped"):
        inspect("memory://run/tokens/web/shard_00000.bin", 0)
