"""``match`` over a whole data run: documents by number, every stream, a result that can be kept; wrong benchmarks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.errors import InputError
from quern.lineage.match import GramIndex, Item, Matches, index, match, read_benchmark
from quern.lineage.store import IndexedRun
from support.lineage import runs as R

THIRTEEN = "one two three four five six seven eight nine ten eleven twelve thirteen"
ITEMS = [
    {"id": "long", "question": f"{THIRTEEN} fourteen fifteen", "note": "the answer"},
    {"task_id": "short/1", "question": "Apples, pears and plums: which of them are red?"},
    {"question": "too short"},
    {"id": "long", "question": f"{THIRTEEN} fourteen fifteen"},
]


def planted_run(folder: Path) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """A run whose first documents of each stream hold text of items; what is planted, and its spans."""
    found = R.listing(seed=4, documents=80, files=2)
    planted = {}
    for stream, rows in found.spans.items():
        own = [row for row in rows if not row["purged"]]
        texts = [
            f"Intro. {THIRTEEN.upper()} end, {stream}",
            f"{THIRTEEN} fourteen fifteen. Apples pears and plums; which of them are red {stream}",
        ]
        for row, text in zip(own, texts, strict=False):
            found.texts[row["doc_id"]] = text
            planted[row["doc_id"]] = (stream, text)
        purged = [row for row in rows if row["purged"]]
        for row in purged[:1]:
            found.texts[row["doc_id"]] = THIRTEEN
        start = 0
        for row in rows:
            row["start"], row["length"] = start, len(found.texts[row["doc_id"]].encode()) + 1
            start += row["length"]
    R.write_listing(folder, found, identity="planted")
    return planted, found.spans


def write_items(path: Path, items: list[dict[str, Any]] = ITEMS) -> str:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return str(path)


def test_every_stream_is_searched_and_a_kept_result_reads_back(tmp_path: Path) -> None:
    planted, spans = planted_run(tmp_path / "run")
    run = IndexedRun(str(tmp_path / "run"))
    found = match(run, write_items(tmp_path / "items.jsonl"))
    starts = {row["doc_id"]: row["start"] for rows in spans.values() for row in rows}
    expected = []
    for doc_id, (stream, text) in planted.items():
        at = starts[doc_id]
        first = text.index(THIRTEEN[:3]) if THIRTEEN in text else text.index("ONE")
        stop = text.index(". Apples") if "Apples" in text else text.index(" end")
        grams = 3 if "fifteen" in text else 1
        rows = [(item, at + first, at + stop, grams, grams / 3) for item in (0, 3)]
        if "Apples" in text:
            rows.insert(1, (1, at + text.index("Apples"), at + text.index("red") + 3, 1, 1.0))
        expected += [(run.find(doc=doc_id)[0], doc_id, stream, *row) for row in rows]
    assert len({stream for stream, _ in planted.values()}) == len(run.streams) == 4
    order = [stream.name for stream in run.streams]
    expected.sort(key=lambda row: (order.index(row[2]), starts[row[1]], row[3]))
    assert rows_of(found) == expected
    assert [item.grams for item in found.items] == [3, 1, 0, 3]
    assert [(item.id, item.line) for item in found.not_looked_for] == [("3", 3)]
    found.save(str(tmp_path / "kept.parquet"))
    kept = Matches.load(str(tmp_path / "kept.parquet"))
    assert rows_of(kept) == expected
    for name in ("items", "identities", "names", "run_id", "version", "n", "benchmark", "urls", "sources"):
        assert getattr(kept, name) == getattr(found, name)
    documents = run.documents(found.numbers)
    assert (found.doc_ids, found.urls, found.sources) == (documents.doc_ids, documents.urls, documents.sources)


def rows_of(found: Matches) -> list[tuple[Any, ...]]:
    columns = (found.item_index, found.starts, found.stops, found.grams, found.coverage)
    names = [found.names[stream] for stream in found.streams.tolist()]
    return list(zip(found.numbers.tolist(), found.doc_ids, names, *(c.tolist() for c in columns), strict=True))


@pytest.mark.slow
def test_least_coverage_fields_and_n(tmp_path: Path) -> None:
    planted, _ = planted_run(tmp_path / "run")
    whole = sum("Apples" in text for _, text in planted.values())
    part = len(planted) - whole
    assert whole >= 2
    assert part >= 2
    run = IndexedRun(str(tmp_path / "run"))
    path = write_items(tmp_path / "items.jsonl")
    assert set(match(run, path, min_coverage=0.5).coverage.tolist()) == {1.0}
    assert len(match(run, path, n=16)) == 3 * whole  # the items of 15 words are one gram each now
    assert len(match(run, path, min_coverage=0.33)) == 3 * whole + 2 * part
    with pytest.raises(InputError, match=r"items.jsonl: line 2: note: no such field \(it has task_id, question\)"):
        match(run, path, fields=["question", "note"])
    with pytest.raises(InputError, match=r"-n: expected a number of words ≥ 1, got 0"):
        match(run, path, n=0)
    with pytest.raises(InputError, match=r"--min-coverage: expected a share from 0 to 1, got nan"):
        match(run, path, min_coverage=float("nan"))
    (tmp_path / "none.jsonl").write_text(json.dumps({"text": " ".join(f"nowhere{i}" for i in range(20))}))
    empty = match(run, str(tmp_path / "none.jsonl"))
    assert (len(empty), len(empty.items)) == (0, 1)
    empty.save(str(tmp_path / "empty.parquet"))
    assert len(Matches.load(str(tmp_path / "empty.parquet"))) == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": ', "line 2: not valid JSON"),
        (b"[" * 100_000, "line 2: not valid JSON"),
        (b'{"question": ' + b"9" * 5000 + b"}", "line 2: not valid JSON"),
        (b'["question"]', r"line 2: expected an object, got '\[\"question\"\]'"),
        (b'{"question": "\xff"}', "line 2: not UTF-8"),
        (b'{"answer": "x"}', "line 2: question: no such field"),
        (b'{"question": 3}', "line 2: question: expected text or a list of texts, got 3"),
        (b'{"question": ["a", 3]}', "line 2: question: expected text or a list of texts"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'{"question": "fine"}\n' + line + b"\n")
    with pytest.raises(InputError, match=f"items.jsonl: {message}"):
        read_benchmark(str(path), ["question"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"none.jsonl: no such file"):
        read_benchmark(str(tmp_path / "none.jsonl"))
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"question": "fine"}\n' * 999)[:-20])
    with pytest.raises(InputError, match=r"torn.jsonl.gz: cannot be read"):
        read_benchmark(str(tmp_path / "torn.jsonl.gz"))
    monkeypatch.setattr(index, "_MOST_BYTES", 1000)
    for name, pack in (("large.jsonl", bytes), ("large.jsonl.gz", gzip.compress)):
        (tmp_path / name).write_bytes(pack(b'{"question": "fine"}\n' * 51))
        with pytest.raises(InputError, match=rf"{name}: expected at most 0 MiB of text, got more; divide it"):
            read_benchmark(str(tmp_path / name))
    (tmp_path / "other.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(InputError, match=r"other.parquet: expected a result of quern lineage match --out"):
        Matches.load(str(tmp_path / "other.parquet"))
    with pytest.raises(InputError, match=r"gone.parquet: no such file"):
        Matches.load(str(tmp_path / "gone.parquet"))


def test_what_an_item_is(tmp_path: Path) -> None:
    lines = [
        '\ufeff{"id": 7, "a": "x", "b": ["y", "z"], "c": [1], "d": null, "task_id": "t"}',
        "",
        '{"task_id": "bad \\ud800 id", "a": ""}\r',
        '{"id": null, "a": "\\ud800"}',
    ]
    path = tmp_path / "items.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert read_benchmark(str(path)) == [
        Item("7", 1, ("x", "y", "z")),
        Item("bad ? id", 3, ("",)),
        Item("4", 4, ("\ud800",)),
    ]
    assert read_benchmark(str(path), ["a"])[0] == Item("7", 1, ("x",))
    assert GramIndex(read_benchmark(str(path)), 13).num_grams.tolist() == [0, 0, 0]


def test_grams_do_not_reach_from_field_to_field() -> None:
    words = THIRTEEN.split()
    halves = Item("i", 1, (" ".join(words[:9]), " ".join(words[9:])))
    assert GramIndex([halves], 13).num_grams.tolist() == [1]  # the first half, whole
    assert np.array_equal(GramIndex([halves], 3).num_grams, [7 + 2])
