"""Documents to shards: the global order, the cuts, the held-out share."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quern.data_pipeline.execution.engine import InProcess
from quern.data_pipeline.page.keys import keys_of
from quern.errors import InputError, QuernError
from quern.tokenize.encoding import TokenizeConfig, load_encoding
from quern.tokenize.shards import ShardReader
from quern.tokenize.writing import choose, merge
from quern.tokenize.writing import run as run_module
from quern.tokenize.writing import sorted_runs as runs
from quern.tokenize.writing.run import run

SEED = 5
relaxed = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Shuffling(InProcess):
    """Runs the tasks of a map in a random order, as workers would end them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def map(self, function: Callable, tasks: Sequence[tuple], **_: Any) -> Iterator[tuple[int, Any]]:
        order = list(range(len(tasks)))
        self.random.shuffle(order)
        for index in order:
            yield index, function(*tasks[index])


def keyed(purpose: str, identity: bytes, seed: int = SEED) -> int:
    data = str(seed).encode() + b"\0" + purpose.encode() + b"\0" + identity
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def walk(
    docs: list, removed: set[bytes], clusters: dict[bytes, bytes], config: TokenizeConfig, shift: int = 0
) -> dict[str, list]:
    """The streams of one source in plain Python: lists of shards of (doc_id, ids with EOT)."""
    encoding = load_encoding(config.encoding, config.ranks)
    streams: dict[str, list] = {"": [], ".val": []}
    kept = [doc for doc in docs if doc.kept and doc.doc_id not in removed]
    for doc in sorted(kept, key=lambda d: (keyed("place", d.doc_id) >> shift, d.doc_id)):
        cluster = clusters.get(doc.doc_id, doc.doc_id)
        shards = streams[".val" if keyed("validation", cluster) < config.validation * 2**64 else ""]
        if not shards or sum(len(ids) for _, ids in shards[-1]) >= config.shard_tokens:
            shards.append([])
        shards[-1].append((doc.doc_id, [*encoding.core.encode_ordinary(doc.text), encoding.eot_id]))
    return streams


def check(read_stream: Callable, run_dir: Path, source: str, expected: dict[str, list], width: int) -> None:
    for suffix, shards in expected.items():
        found = read_stream(run_dir, source + suffix)
        assert len(found) == len(shards)
        for shard, documents in zip(found, shards, strict=True):
            ids = [token for _, own in documents for token in own]
            assert shard["bin"] == b"".join(token.to_bytes(width, "little") for token in ids)
            position = 0
            for span, (doc_id, own) in zip(shard["spans"], documents, strict=True):
                assert span == {"doc_id": doc_id, "start": position, "length": len(own), "purged": False}
                position += len(own)


@pytest.mark.slow
@settings(relaxed, max_examples=16)
@given(data=st.data(), count=st.integers(0, 40), seed=st.integers(0, 2**32))
def test_streams_are_those_of_a_walk_over_all_documents(
    make_run: Callable, make_doc: type, read_stream: Callable, tiny_ranks: str, tmp_path_factory: Any,
    monkeypatch: pytest.MonkeyPatch, data: st.DataObject, count: int, seed: int,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    values = [
        rng.choice([rng.randbytes(16), rng.randbytes(2) + b"\0" * 14, b"\0" * 15 + rng.randbytes(1)])
        for _ in range(count)
    ]
    ids = list(dict.fromkeys(values))
    words = ["the", " the", " a", "in", "é", "<|endoftext|>", "\n", "aaaa", "\U0001f600"]
    docs = [make_doc(i, "".join(rng.choices(words, k=rng.randint(0, 6))), kept=rng.random() < 0.8) for i in ids]
    removed = {doc_id for doc_id in ids if rng.random() < 0.2}
    clusters = {doc_id: rng.choice(ids) for doc_id in ids if rng.random() < 0.6}
    for name in ("RUN_TOKENS", "SLICE_TOKENS", "JOIN_DOCUMENTS", "GATHER_DOCUMENTS"):
        monkeypatch.setattr(run_module, name, data.draw(st.integers(1, 30)))
    monkeypatch.setattr(choose, "_JOIN_ROWS", data.draw(st.integers(1, 9)))
    monkeypatch.setattr(merge, "_WRITE_TOKENS", data.draw(st.integers(1, 30)))
    # Few documents in 1,024 key ranges hardly ever share one; shorter keys do, and the shortest collide.
    shift = data.draw(st.sampled_from([0, 9, 60]))
    monkeypatch.setattr(runs, "place_key", lambda seed, doc_id: keyed("place", doc_id, seed) >> shift)
    split = data.draw(st.integers(1, 4))
    partitions = {("web", f"p{i}"): docs[i::split] for i in range(split)}
    config = TokenizeConfig(
        encoding="own",
        ranks=tiny_ranks,
        shard_tokens=data.draw(st.integers(1, 40)),
        validation=data.draw(st.sampled_from([0.001, 0.3, 0.7, 0.999])),
    )
    run_dir = tmp_path_factory.mktemp("run")
    names = make_run(run_dir, partitions, removed, clusters)
    report = run(str(run_dir), names, config, SEED, Shuffling(split), str(run_dir / ".work"))
    expected = walk(docs, removed, clusters, config, shift)
    check(read_stream, run_dir, "web", expected, 2)
    counts = asdict(report)["sources"]["web"]
    for name, suffix in (("train", ""), ("val", ".val")):
        shards = expected[suffix]
        assert counts[name] == {
            "documents": sum(map(len, shards)),
            "tokens": sum(len(own) for shard in shards for _, own in shard),
            "shards": len(shards),
        }


@pytest.mark.slow
def test_partitions_and_workers_leave_no_mark_on_the_bytes(
    tokenize: Callable,
    small: Callable,
    config: TokenizeConfig,
    token_files: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenize(tmp_path / "a", small(tmp_path / "a", 1), config)
    expected = token_files(tmp_path / "a")
    assert sum(name.endswith(".bin") for name in expected) >= 8
    for number, split in enumerate((2, 7)):
        monkeypatch.setattr(run_module, "RUN_TOKENS", 100)
        monkeypatch.setattr(run_module, "SLICE_TOKENS", 70)
        monkeypatch.setattr(run_module, "GATHER_DOCUMENTS", 3)
        monkeypatch.setattr(run_module, "JOIN_DOCUMENTS", 10)
        run_dir = tmp_path / f"b{number}"
        tokenize(run_dir, small(run_dir, split), config, Shuffling(number))
        assert token_files(run_dir) == expected


def test_every_stream_is_whole_and_readable(
    tokenize: Callable, small: Callable, config: TokenizeConfig, read_stream: Callable, tmp_path: Path
) -> None:
    tokenize(tmp_path, small(tmp_path, 3), config)
    encoding = load_encoding(config.encoding, config.ranks)
    for source, docs in small.docs.items():  # type: ignore[attr-defined]
        expected = walk(docs, small.removed, small.clusters, config)  # type: ignore[attr-defined]
        check(read_stream, tmp_path, source, expected, 2)
        text_of = {doc.doc_id: doc.text for doc in docs}
        for stream in (source, f"{source}.val"):
            reader = ShardReader(str(tmp_path / "tokens" / stream), verify=True)
            assert reader.num_documents > 3
            for shard, info in enumerate(reader.shards):
                for index in range(info.documents):
                    tokens = reader.document(shard, index)
                    assert encoding.decode(tokens[:-1]) == text_of[reader.span(shard, index).doc_id]
                    assert tokens[-1] == reader.eot_id == encoding.eot_id


def test_a_cluster_is_never_on_both_sides(
    tokenize: Callable, make_run: Callable, make_doc: type, config: TokenizeConfig, tmp_path: Path
) -> None:
    docs = [make_doc(bytes([n]) * 16, f"text {n}") for n in range(200)]
    clusters = {doc.doc_id: docs[n // 4 * 4].doc_id for n, doc in enumerate(docs)}
    tokenize(tmp_path, make_run(tmp_path, {("web", "p"): docs}, (), clusters), config)
    sides: dict[bytes, set[str]] = {}
    for stream in ("web", "web.val"):
        reader = ShardReader(str(tmp_path / "tokens" / stream))
        for shard in range(len(reader.shards)):
            for doc_id in reader.spans(shard)["doc_id"].to_pylist():
                sides.setdefault(clusters[doc_id], set()).add(stream)
    assert len(sides) == 50
    assert all(len(side) == 1 for side in sides.values())
    assert {stream for side in sides.values() for stream in side} == {"web", "web.val"}


@pytest.mark.slow
def test_ids_beyond_uint16_are_stored_in_four_bytes(
    tokenize: Callable, make_run: Callable, make_doc: type, read_stream: Callable, wide_ranks: str, tmp_path: Path
) -> None:
    docs = [make_doc(bytes([n]) * 16, "zz Zy éa"[n:]) for n in range(4)]
    config = TokenizeConfig(encoding="wide", ranks=wide_ranks, shard_tokens=4, validation=0.5)
    report = tokenize(tmp_path, make_run(tmp_path, {("web", "p"): docs}), config)
    assert (report.dtype, report.eot_id) == ("uint32", 65_792)
    check(read_stream, tmp_path, "web", walk(docs, set(), {}, config), 4)


def test_equal_place_keys_are_ordered_by_doc_id(
    tokenize: Callable,
    make_run: Callable,
    make_doc: type,
    config: TokenizeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "place_key", lambda seed, doc_id: (doc_id[-1] % 3) << 60)
    docs = [make_doc(bytes([n * 37 % 251]) + b"\0" * 14 + bytes([n]), "the " * (n % 5)) for n in range(40)]
    config = config.model_copy(update={"shard_tokens": 11, "validation": 0.0})
    tokenize(tmp_path, make_run(tmp_path, {("web", f"p{i}"): docs[i::4] for i in range(4)}), config)
    reader = ShardReader(str(tmp_path / "tokens" / "web"))
    found = [doc_id for shard in range(len(reader.shards)) for doc_id in reader.spans(shard)["doc_id"].to_pylist()]
    assert found == [d.doc_id for d in sorted(docs, key=lambda d: (d.doc_id[-1] % 3, d.doc_id))]


def test_a_sliced_id_column_is_read_from_its_own_start() -> None:
    column = pa.array([bytes([n]) * 16 for n in range(5)], pa.binary(16))[2:4]
    assert keys_of(column).tobytes() == b"\2" * 16 + b"\3" * 16


def test_the_files_say_what_they_hold(
    tokenize: Callable, small: Callable, config: TokenizeConfig, tmp_path: Path
) -> None:
    tokenize(tmp_path, small(tmp_path, 2), config)
    root = tmp_path / "tokens"
    version = json.loads((root / "VERSION.json").read_text())
    assert (version["version"], version["parent"], version["kind"]) == (1, None, "initial")
    assert set(version["sources"]) == {"books", "books.val", "web", "web.val"}
    listed = {"VERSION.json", version["encoding"]["ranks"]}
    assert hashlib.sha256((root / "encoding.tiktoken").read_bytes()).hexdigest() == version["encoding"]["sha256"]
    for stream, entry in version["sources"].items():
        manifest_bytes = (root / entry["manifest"]).read_bytes()
        assert hashlib.sha256(manifest_bytes).hexdigest() == entry["sha256"]
        manifest = json.loads(manifest_bytes)
        assert (manifest["encoding"], manifest["dtype"], manifest["eot_id"], manifest["seed"]) == (
            "own",
            "uint16",
            270,
            SEED,
        )
        assert entry["tokens"] == sum(shard["tokens"] for shard in manifest["shards"])
        listed.add(entry["manifest"])
        for shard, own in zip(entry["shards"], manifest["shards"], strict=True):
            assert (shard["tokens"], shard["documents"]) == (own["tokens"], own["documents"])
            assert shard["bin"] == f"{stream}/{own['bin']}"
            for name, sha in (("bin", "sha256"), ("spans", "spans_sha256")):
                data = (root / shard[name]).read_bytes()
                assert hashlib.sha256(data).hexdigest() == shard[sha] == own[sha]
                listed.add(shard[name])
    assert {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()} == listed
    assert not (tmp_path / ".work" / "tokens").exists()


# --- edges and refusals ---------------------------------------------------------------------------------------------


def test_a_run_without_documents_is_a_corpus_without_shards(
    tokenize: Callable, make_run: Callable, make_doc: type, config: TokenizeConfig, tmp_path: Path
) -> None:
    dropped = make_doc(b"x" * 16, "dropped", kept=False)
    report = tokenize(tmp_path, make_run(tmp_path, {("web", "p"): [], ("code", "q"): [dropped]}), config)
    assert {s: {k: c.shards for k, c in v.items()} for s, v in report.sources.items()} == {
        "code": {"train": 0, "val": 0},
        "web": {"train": 0, "val": 0},
    }
    reader = ShardReader(str(tmp_path / "tokens" / "web"), verify=True)
    assert (reader.total_tokens, reader.num_documents, reader.num_windows(4)) == (0, 0, 0)
    assert reader.tokens(0, 0).tolist() == []
    assert reader.shards == ()


def test_without_a_held_out_share_there_is_no_validation_stream(
    tokenize: Callable, small: Callable, config: TokenizeConfig, tmp_path: Path
) -> None:
    report = tokenize(tmp_path, small(tmp_path, 1), config.model_copy(update={"validation": 0.0}))
    assert report.sources["web"]["val"].documents == 0
    assert sorted(p.name for p in (tmp_path / "tokens").iterdir()) == [
        "VERSION.json",
        "books",
        "encoding.tiktoken",
        "web",
    ]


@pytest.mark.parametrize("group", [1, 1000])
def test_one_doc_id_in_two_partitions_ends_the_run(
    tokenize: Callable,
    make_run: Callable,
    make_doc: type,
    config: TokenizeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: int,
) -> None:
    monkeypatch.setattr(run_module, "JOIN_DOCUMENTS", group)
    partitions = {("web", f"p{i}"): [make_doc(b"same" * 4, "a text")] for i in range(2)}
    with pytest.raises(QuernError, match=b"same".hex() * 4):
        tokenize(tmp_path, make_run(tmp_path, partitions), config)


def test_a_changed_corpus_is_not_run_again(
    tokenize: Callable, small: Callable, config: TokenizeConfig, tmp_path: Path
) -> None:
    names = small(tmp_path, 1)
    tokenize(tmp_path, names, config)
    path = tmp_path / "tokens" / "VERSION.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2, "parent": 1, "kind": "mask"}))
    with pytest.raises(InputError, match=r"version 2 \(mask\)"):
        tokenize(tmp_path, names, config)


@pytest.mark.parametrize(
    "name", ["duplicates/decisions.parquet", "duplicates/clusters.parquet", "commits/pages/web/p0.json"]
)
def test_an_unfinished_earlier_phase_is_named(
    tokenize: Callable, small: Callable, config: TokenizeConfig, tmp_path: Path, name: str
) -> None:
    names = small(tmp_path, 1)
    (tmp_path / name).unlink()
    with pytest.raises(QuernError, match=name.replace(".", r"\.")):
        tokenize(tmp_path, names, config)


def test_a_partition_may_be_called_like_a_shard(
    tokenize: Callable,
    make_run: Callable,
    make_doc: type,
    config: TokenizeConfig,
    token_files: Callable,
    tmp_path: Path,
) -> None:
    docs = [make_doc(bytes([n]) * 16, "the inn") for n in range(9)]
    for folder, partition in (("a", "shard_00000"), ("b", "p")):
        names = make_run(tmp_path / folder, {("all", partition): docs})
        tokenize(tmp_path / folder, names, config)
        tokenize(tmp_path / folder, names, config)
    assert token_files(tmp_path / "a") == token_files(tmp_path / "b")


def test_the_seed_decides_the_order(
    tokenize: Callable, small: Callable, config: TokenizeConfig, token_files: Callable, tmp_path: Path
) -> None:
    for seed in (1, 2):
        tokenize(tmp_path / str(seed), small(tmp_path / str(seed), 1), config, seed=seed)
    first, second = (token_files(tmp_path / str(seed)) for seed in (1, 2))
    assert first["web/shard_00000.bin"] != second["web/shard_00000.bin"]


@pytest.mark.shared
def test_gpt2_by_name_runs_from_its_own_ranks(
    tokenize: Callable, make_run: Callable, make_doc: type, read_stream: Callable, gpt2_ranks: Path, tmp_path: Path
) -> None:
    docs = [make_doc(bytes([n]) * 16, f"Hello world <|endoftext|> {n}") for n in range(20)]
    config = TokenizeConfig(encoding="gpt2", validation=0.5)
    tokenize(tmp_path, make_run(tmp_path, {("web", "p"): docs}), config)
    assert (tmp_path / "tokens" / "encoding.tiktoken").read_bytes() == gpt2_ranks.read_bytes()
    expected = walk(docs, set(), {}, config)
    check(read_stream, tmp_path, "web", expected, 2)
    ids = np.concatenate([own for _, own in expected[""][0]])
    assert (ids == 50_256).sum() == len(expected[""][0])
