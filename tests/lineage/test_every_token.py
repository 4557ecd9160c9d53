"""Every token of a data run, held out or not, leads to its document, its page and the very record in the crawl's file;
and every document to its tokens, or to none."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from warcio.archiveiterator import ArchiveIterator

from quern.lineage.store import IndexedRun
from support.data_pipeline.in_process import run_config
from support.lineage import recorder
from support.lineage.scenario import real, sample


@dataclass(frozen=True)
class Case:
    run_dir: Path
    corpus: Any
    """The streams cut at their EOT ids, documents named by the hash of what they decode to."""
    lineage: IndexedRun


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("sample", marks=pytest.mark.slow),
        pytest.param("real", marks=[pytest.mark.long, pytest.mark.shared]),
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "real":
            shared = request.getfixturevalue("shared")
            patch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "data" / "tokenizer" / "tiktoken_cache"))
        config, *_ = real(folder, shared, encoding="gpt2") if request.param == "real" else sample(folder)
        run_config(config)
    shutil.copytree(folder / "run" / "tokens", folder / "copy")
    corpus = recorder.Corpus(folder / "run", folder / "copy")
    return Case(folder / "run", corpus, IndexedRun(str(folder / "run")))


@pytest.mark.slow
def test_every_token_leads_to_its_document(case: Case) -> None:
    """All tokens at once, each as a range of its own; then the whole stream as one range."""
    lineage = case.lineage
    assert [stream.name for stream in lineage.streams if stream.held_out] == [
        stream.name for stream in lineage.streams if stream.name.endswith(".val")
    ]
    assert {stream.name for stream in lineage.streams} == case.corpus.streams.keys()
    for number, stream in enumerate(lineage.streams):
        copied = case.corpus.streams[stream.name]
        total = len(copied.tokens_T)
        assert (stream.total_tokens, stream.num_spans) == (total, len(copied.starts_D))
        lengths = copied.stops_D - copied.starts_D
        spans, which = lineage.spans_in(stream, [0], [total])
        assert which.tolist() == [0] * len(lengths)
        assert spans.starts.tolist() == copied.starts_D.tolist()
        assert spans.lengths.tolist() == lengths.tolist()
        assert spans.streams.tolist() == [number] * len(lengths)
        assert not spans.purged.any()
        documents = lineage.documents(spans.numbers)
        assert tuple(documents.doc_ids) == copied.doc_ids
        rows = [case.corpus.rows[name] for name in copied.doc_ids]
        assert list(documents.urls) == [row["url"] for row in rows]
        assert list(documents.sources) == [row["source"] for row in rows]
        tokens = np.arange(total)
        each, which = lineage.spans_in(stream, tokens, tokens + 1)
        assert np.array_equal(which, tokens)
        assert np.array_equal(each.numbers, np.repeat(spans.numbers, lengths))
        assert np.array_equal(each.starts, np.repeat(copied.starts_D, lengths))


def test_every_span_decodes_to_the_text_that_was_kept(case: Case) -> None:
    for stream in case.lineage.streams:
        spans, _ = case.lineage.spans_in(stream, [0], [stream.total_tokens])
        for name, start, length in zip(
            case.lineage.documents(spans.numbers).doc_ids, spans.starts.tolist(), spans.lengths.tolist(), strict=True
        ):
            tokens = stream.reader.tokens(start, start + length)
            assert int(tokens[-1]) == case.corpus.eot
            assert case.corpus.decode(tokens[:-1].tolist()) == case.corpus.texts[name]


def test_every_document_leads_to_its_tokens_or_to_none(case: Case) -> None:
    lineage = case.lineage
    numbers = np.arange(lineage.num_documents)
    names = lineage.documents(numbers).doc_ids
    assert Counter(names) == Counter(list(case.corpus.rows))
    where = {
        name: (stream.name, int(start), int(stop - start))
        for stream in case.corpus.streams.values()
        for name, start, stop in zip(stream.doc_ids, stream.starts_D, stream.stops_D, strict=True)
    }
    assert where.keys() == case.corpus.tokenized
    spans = lineage.spans_of(numbers)
    told = {
        names[number]: (lineage.streams[stream].name, start, length)
        for number, stream, start, length in zip(
            *(column.tolist() for column in (spans.numbers, spans.streams, spans.starts, spans.lengths)), strict=True
        )
    }
    assert len(spans.numbers) == len(told)
    assert told == where
    backwards = lineage.spans_of(numbers[::-1])
    assert backwards.numbers.tolist() == spans.numbers.tolist()[::-1]


@pytest.mark.slow
def test_every_document_is_the_row_and_the_record_it_says(case: Case) -> None:
    """The record at the offset in the file is read by warcio (a line of JSONL by Python), dropped pages too."""
    lineage = case.lineage
    names = lineage.documents(np.arange(lineage.num_documents)).doc_ids
    kinds: Counter[str] = Counter()
    for number, name in enumerate(names):
        verdict = lineage.verdict(number)
        row = case.corpus.rows[name]
        assert {key: verdict[key] for key in row} == row
        kinds[check_record(verdict)] += 1
        assert lineage.find(doc=name.hex()).tolist() == [number]
        if row["post_filter_hash"] is not None:
            equal = [n for n, other in case.corpus.rows.items() if has_hash(other, row["post_filter_hash"])]
            found = lineage.find(hash=row["post_filter_hash"])
            assert sorted(names[other] for other in found.tolist()) == sorted(equal)
        if row["url"] is not None:
            assert number in lineage.find(url=row["url"]).tolist()
    assert kinds["warc"] > 100
    assert kinds["jsonl"] > 100


def has_hash(row: Mapping[str, Any], digest: bytes) -> bool:
    return digest in (row["pre_filter_hash"], row["post_filter_hash"])


def check_record(row: Mapping[str, Any]) -> str:
    """Which kind of file the record is of."""
    with open(row["source_file"], "rb") as file:
        file.seek(row["record_offset"])
        data = file.read(row["record_length"])
        if row["source_file"].endswith(".jsonl"):
            assert json.loads(data)["id"] == row["record_id"]
            return "jsonl"
        file.seek(row["record_offset"])
        record = next(iter(ArchiveIterator(file)))
        headers = record.rec_headers
        assert headers.get_header("WARC-Target-URI") == row["url"]
        assert headers.get_header("WARC-Record-ID") == row["record_id"]
        assert gzip.decompress(data).startswith(b"WARC/1.")  # the length is that of the record's gzip member
        return "warc"
