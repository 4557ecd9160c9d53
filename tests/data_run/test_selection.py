"""Selections of documents of a run: the table against plain Python; killed, in any order; and wrong requests."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quern import storage
from quern.data_pipeline.execution.run_directory import BusyError, sole_driver
from quern.data_pipeline.execution.tasks import InProcess
from quern.data_run.selection import passes, pool
from quern.data_run.selection import run as module
from quern.data_run.selection.run import Selection, select
from quern.errors import InputError, QuernError
from quern.lineage.purge.proof.placed import strangers
from quern.mixtures.importance.draw import CANDIDATE, Draw
from quern.mixtures.importance.weights import gumbel
from quern.tokenize.selection.measures import published
from quern.tokenize.selection.measures import rows_of as table_rows
from quern.tokenize.writing import choose
from support.lineage.runs import Listing
from support.lineage.selections import files_of, read_documents, rows_of, write_topics

K = 20


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listing]:
    folder = tmp_path_factory.mktemp("topics")
    return folder, write_topics(folder, sources=("web", "text"))


@pytest.fixture
def folder(written: tuple[Path, Listing], tmp_path: Path) -> Path:
    shutil.copytree(written[0], tmp_path / "own")
    return tmp_path / "own"


def asked(folder: Path, **more: Any) -> Selection:
    given: dict[str, Any] = {
        "name": "mill",
        "targets": (str(folder / "target.jsonl"),),
        "min_words": 1,
        "num_buckets": 50,
    }
    if "keep_tokens" not in more:
        given["keep_documents"] = K
    return Selection(str(folder / "run"), **given | more)


def selected(folder: Path, **more: Any) -> dict[str, Any]:
    return select(asked(folder, **more), workers=1, tell=lambda line: None)


def plain_weights(texts: dict[bytes, str], target: Sequence[str], num_buckets: int = 50) -> dict[bytes, float]:
    """Counters and logarithms of Python alone; the words of the topics stand between spaces."""

    def counts(text: str) -> Counter[int]:
        words = text.split()
        grams = [*words, *(f"{first} {second}" for first, second in pairwise(words))]
        return Counter(int(hashlib.sha256(gram.encode()).hexdigest(), 16) % num_buckets for gram in grams)

    p, q = (sum(map(counts, each), Counter()) for each in (target, texts.values()))

    def ratio(bucket: int) -> float:
        return math.log(p[bucket] / p.total() + 1e-8) - math.log(q[bucket] / q.total() + 1e-8)

    return {
        doc_id: math.fsum(times * ratio(bucket) for bucket, times in counts(text).items())
        for doc_id, text in texts.items()
    }


def target_of(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (folder / "target.jsonl").read_text().splitlines()]


# ---- what is written


def test_the_table_is_that_of_plain_python(written: tuple[Path, Listing], folder: Path) -> None:
    found = written[1]
    tokens = read_documents(found)
    weights = plain_weights({doc_id: found.texts[doc_id] for doc_id in tokens}, target_of(folder))
    manifest = selected(folder, seed=3)
    rows = rows_of(folder / "run", "mill")
    assert {row["doc_id"]: row["log_weight"] for row in rows} == pytest.approx(weights, abs=1e-9)
    assert len(rows) == len(weights) == manifest["documents"]
    scores = {doc_id: weight + float(gumbel(3, [doc_id])[0]) for doc_id, weight in weights.items()}
    first = sorted(scores, key=lambda doc_id: -scores[doc_id])[:K]
    assert {row["doc_id"]: row["rank"] for row in rows if row["chosen"]} == {
        own: rank for rank, own in enumerate(first)
    }
    assert all(row["rank"] is None for row in rows if not row["chosen"])
    values = np.exp(np.array(list(weights.values()), np.longdouble))
    assert manifest["effective_size"] == pytest.approx(float(values.sum() ** 2 / (values**2).sum()), rel=1e-9)
    assert manifest["tokens"] == sum(tokens.values())
    assert (manifest["chosen"], manifest["chosen_tokens"]) == (K, sum(tokens[doc_id] for doc_id in first))
    assert manifest["words"] == sum(len(found.texts[doc_id].split()) for doc_id in tokens)
    assert manifest["target_features"] == 40 * (2 * 12 - 1)
    assert manifest["features"] == sum(2 * len(found.texts[doc_id].split()) - 1 for doc_id in tokens)
    assert (manifest["format"], manifest["seed"], manifest["keep"]) == (1, 3, {"documents": K})
    assert manifest["corpus"]["run_id"] == "topics"
    assert manifest["corpus"]["corpus_version"] == 1
    (told,) = manifest["targets"]
    assert told["sha256"] == hashlib.sha256((folder / "target.jsonl").read_bytes()).hexdigest()
    root = folder / "run" / "measures" / "mill"
    for number, part in enumerate(manifest["parts"]):
        file = root / f"part-{number:05d}.parquet"
        assert part["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
        own = pq.read_table(folder / "run" / "documents" / part["table"])["doc_id"].to_pylist()
        assert pq.read_table(file)["doc_id"].to_pylist() == [doc_id for doc_id in own if doc_id in tokens]
    assert {path.name for path in root.iterdir()} == {"manifest.json", *(f"part-{n:05d}.parquet" for n in range(4))}
    assert pq.read_schema(root / "part-00000.parquet").equals(
        pa.schema([
            pa.field("doc_id", pa.binary(16), nullable=False), pa.field("log_weight", pa.float64(), nullable=False),
            pa.field("rank", pa.int64()), pa.field("chosen", pa.bool_(), nullable=False),
        ])
    )  # fmt: skip
    assert not [name for name, _ in strangers(str(folder / "run"), None) if name.startswith("measures")]


def test_a_source_is_weighed_alone(written: tuple[Path, Listing], folder: Path) -> None:
    found = written[1]
    selected(folder, sources=("text",))
    own = {"text": found.spans["text"]}
    found_ids = read_documents(Listing(spans=own))
    weights = plain_weights({doc_id: found.texts[doc_id] for doc_id in found_ids}, target_of(folder))
    assert {row["doc_id"]: row["log_weight"] for row in rows_of(folder / "run", "mill")} == pytest.approx(weights)


def test_tokens_are_a_limit(folder: Path) -> None:
    most = 500
    manifest = selected(folder, keep_tokens=most)
    every = selected(folder, name="every", keep_documents=manifest["chosen"] + 1)
    assert manifest["chosen_tokens"] <= most < every["chosen_tokens"]
    ranks = {row["doc_id"]: row["rank"] for row in rows_of(folder / "run", "every") if row["chosen"]}
    few = {row["doc_id"]: row["rank"] for row in rows_of(folder / "run", "mill") if row["chosen"]}
    assert few == {doc_id: rank for doc_id, rank in ranks.items() if rank < manifest["chosen"]}


def test_short_documents_are_weighed_and_not_chosen(written: tuple[Path, Listing], folder: Path) -> None:
    texts = written[1].texts
    table = folder / "run" / "documents" / "web" / "part-000.warc.gz.parquet"
    rows = pq.read_table(table).to_pylist()
    for row in rows:
        row["text"] = "mill"
    pq.write_table(pa.Table.from_pylist(rows, pq.read_schema(table)), table)
    short = {row["doc_id"] for row in rows} & read_documents(written[1]).keys()
    manifest = selected(folder, min_words=2)
    assert manifest["short"] == len(short) > 5
    found = {row["doc_id"]: row for row in rows_of(folder / "run", "mill")}
    assert found.keys() == read_documents(written[1]).keys() <= texts.keys()
    assert len({found[doc_id]["log_weight"] for doc_id in short}) == 1
    assert not any(found[doc_id]["chosen"] for doc_id in short)


def test_the_choice_has_the_share_of_the_target_that_weights_predict(folder: Path) -> None:
    """Over 3,000 seeds, of 9 documents: the share is farther from its mean with a chance of 1e-7 (Hoeffding)."""
    selected(folder)
    rows = sorted(rows_of(folder / "run", "mill"), key=lambda row: row["doc_id"])
    pool_share = sum(not row["doc_id"][15] & 1 for row in rows) / len(rows)
    few = [*[row for row in rows if row["doc_id"][15] & 1][:5], *[row for row in rows if not row["doc_id"][15] & 1][:4]]
    weights = [math.exp(row["log_weight"]) for row in few]
    like = [not row["doc_id"][15] & 1 for row in few]
    expected = 0.0
    for sequence in permutations(range(len(few)), 3):
        chance, left = 1.0, sum(weights)
        for own in sequence:
            chance, left = chance * weights[own] / left, left - weights[own]
        expected += chance * sum(like[own] for own in sequence) / 3
    shares = []
    ids = [row["doc_id"] for row in few]
    candidates = np.zeros(len(few), CANDIDATE)
    candidates["row"], candidates["low"] = np.arange(len(few)), np.arange(len(few))
    for seed in range(3000):
        candidates["score"] = np.array([row["log_weight"] for row in few]) + gumbel(seed, ids)
        draw = Draw(3)
        draw.add(candidates)
        shares.append(float(np.mean([like[own] for own in draw.first()["row"]])))
    assert abs(np.mean(shares) - expected) <= math.sqrt(math.log(2 / 1e-7) / (2 * len(shares)))
    assert expected > 4 / 9 + 0.1
    chosen = [not row["doc_id"][15] & 1 for row in rows if row["chosen"]]
    assert sum(chosen) / K > pool_share + 0.2


# ---- the same bytes


class Backwards(InProcess):
    """Does the last task first."""

    def map(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]], **_: Any
    ) -> Iterator[tuple[int, Any]]:
        for index in reversed(range(len(tasks))):
            yield index, function(*tasks[index])


def test_the_order_of_tasks_and_their_sizes_change_no_byte(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selected(folder)
    first = files_of(folder / "run", "mill")
    shutil.rmtree(folder / "run" / "measures")
    monkeypatch.setattr(module, "InProcess", Backwards)
    monkeypatch.setattr(pool, "JOIN_DOCUMENTS", 1)
    monkeypatch.setattr(choose, "_TEXT_ROWS", 3)
    selected(folder)
    assert files_of(folder / "run", "mill") == first


def test_blocks_of_the_table_change_no_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = selected(folder)
    monkeypatch.setattr(passes, "_BLOCK", 7)
    blocks = selected(folder, name="blocks")
    assert rows_of(folder / "run", "mill") == rows_of(folder / "run", "blocks")
    names = ("documents", "short", "words", "tokens", "chosen", "chosen_tokens")
    assert [whole[name] for name in names] == [blocks[name] for name in names]
    assert whole["effective_size"] == pytest.approx(blocks["effective_size"], rel=1e-12)


def test_the_division_into_files_changes_no_choice(folder: Path) -> None:
    selected(folder)
    for source in ("web", "text"):
        tables = sorted((folder / "run" / "documents" / source).iterdir(), reverse=True)
        pq.write_table(pa.concat_tables([pq.read_table(path) for path in tables]), tables[0])
        for path in tables[1:]:
            path.unlink()
    selected(folder, name="one")
    both = [sorted(map(repr, rows_of(folder / "run", name))) for name in ("mill", "one")]
    assert both[0] == both[1]


class KilledError(BaseException):
    """What no code catches."""


@pytest.mark.slow
def test_killed_before_any_publication_it_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_topics(tmp_path)
    run, done = tmp_path / "run", []
    for name in ("count_target", "place", "count_table", "weigh"):
        monkeypatch.setattr(module, name, noting(done, getattr(module, name)))
    left = 10**6

    def check() -> None:
        nonlocal left
        if left == 0:
            raise KilledError
        left -= 1

    with storage.guarded(check):
        selected(tmp_path)
    publications, once = 10**6 - left, Counter(done)
    assert (publications, once) == (15, {"count_target": 1, "place": 1, "count_table": 2, "weigh": 2})
    expected = files_of(run, "mill")
    for survived in range(publications):
        shutil.rmtree(run / "measures")
        done.clear()
        left = survived
        with storage.guarded(check), pytest.raises(KilledError):
            selected(tmp_path)
        assert published(str(run)) == []
        assert not (run / "measures" / "mill" / "manifest.json").exists()
        selected(tmp_path)
        assert files_of(run, "mill") == expected, survived
        assert Counter(done) == once, survived


def noting(done: list[str], function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        found = function(*arguments)
        done.append(function.__name__)  # it has come to its end
        return found

    return noted


def killed(*_: Any) -> None:
    raise KilledError


def test_what_another_unfinished_selection_left_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selected(folder, seed=4)
    expected = files_of(folder / "run", "mill")
    shutil.rmtree(folder / "run" / "measures")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_draw", killed)
        with pytest.raises(KilledError):
            selected(folder, seed=3)
    selected(folder, seed=4)
    assert files_of(folder / "run", "mill") == expected


def test_targets_in_another_order_are_counted_once_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the first file, and given in another order or as a glob then; plain texts of a glob are one task."""
    lines = (folder / "target.jsonl").read_text().splitlines(keepends=True)
    for name, own in (("a", lines[:5]), ("b", lines[5:])):
        (folder / f"{name}.jsonl").write_text("".join(own))
        (folder / f"{name}.txt").write_text("\n".join(json.loads(line)["text"] for line in own))
    count, done = module.count_target, []

    def counted(*arguments: Any, most: int) -> None:
        if len(done) == most:
            raise KilledError
        count(*arguments)
        done.append(arguments)

    for end in ("jsonl", "txt"):
        one, two = (str(folder / f"{name}.{end}") for name in "ab")
        expected = selected(folder, targets=(one, two), name=end)
        shutil.rmtree(folder / "run" / "measures")
        for again, tasks in (((two, one), 1), ((str(folder / f"[ab].{end}"),), 1)):
            done.clear()
            monkeypatch.setattr(module, "count_target", partial(counted, most=1))
            with pytest.raises(KilledError):
                selected(folder, targets=(one, two), name=end)
            done.clear()
            monkeypatch.setattr(module, "count_target", partial(counted, most=9))
            assert selected(folder, targets=again, name=end) == expected, again
            assert len(done) == tasks, again
            shutil.rmtree(folder / "run" / "measures")


def test_texts_that_are_grouped_otherwise_are_counted_once_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when 300 files, a task each, are counted; as a glob, a task has several."""
    (folder / "plain").mkdir()
    for number in range(300):
        (folder / "plain" / f"{number}.txt").write_text("mill and rye")
    with monkeypatch.context() as patch:
        patch.setattr(module, "count_table", killed)
        patch.setattr(module, "place", killed)
        with pytest.raises(KilledError):
            selected(folder, targets=tuple(map(str, (folder / "plain").iterdir())))
    assert selected(folder, targets=(str(folder / "plain" / "*.txt"),))["target_features"] == 300 * 5


def test_a_run_by_a_relative_path_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    relative = Selection("run", "mill", ("target.jsonl",), K, num_buckets=50, min_words=1)
    told: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "_draw", killed)
        with pytest.raises(KilledError):
            select(relative, 1, tell=told.append)
    told.clear()
    select(relative, 1, tell=told.append)
    assert told
    assert all(": 0 of " in line for line in told), told


def test_one_driver_is_at_work(folder: Path) -> None:
    with sole_driver(str(folder / "run")), pytest.raises(BusyError, match="another driver is at work"):
        selected(folder)
    expected = selected(folder)
    with sole_driver(str(folder / "run")):  # what stands there needs no lock
        assert selected(folder) == expected


def test_a_run_that_changes_meanwhile_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "run", folder / "other")
    weigh = module.weigh

    def purged(run: str) -> None:
        path = folder / run / "tokens" / "VERSION.json"
        path.write_text(path.read_text() + "\n")

    @contextmanager
    def late(path: str) -> Iterator[None]:
        purged("run")
        yield

    with monkeypatch.context() as patch:
        patch.setattr(module, "sole_driver", late)
        with pytest.raises(QuernError, match="run: has changed while it was looked at"):
            selected(folder)
    monkeypatch.setattr(module, "weigh", lambda *own: (purged("other"), weigh(*own)))
    with pytest.raises(QuernError, match="other: has changed while it was read"):
        selected(folder, targets=(str(folder / "other"),))
    assert published(str(folder / "run")) == []


def test_a_table_with_other_rows_than_before_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = folder / "run" / "documents" / "web" / "part-000.warc.gz.parquet"
    place = module.place

    def shorter(*arguments: Any) -> None:
        place(*arguments)
        rows = pq.read_table(table)
        pq.write_table(rows.slice(0, rows.num_rows - 1), table)

    monkeypatch.setattr(module, "place", shorter)
    with pytest.raises(QuernError, match=r"part-000.warc.gz.parquet: has \d+ rows, \d+ when its documents were"):
        selected(folder)


def test_torn_files_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_draw", killed)
        with pytest.raises(KilledError):
            selected(folder)
    torn = folder / "run" / "measures" / "mill" / f".part-00000.parquet.{'0' * 32}.tmp"
    assert storage.is_temporary(torn.name)
    torn.write_text("half")
    selected(folder)
    assert not torn.exists()


def test_files_of_somebody_else_stay(folder: Path) -> None:
    root = folder / "run" / "measures" / "mill"
    root.mkdir(parents=True)
    for name in ("scores.parquet", "part-00000.parquet"):
        (root / name).write_text("mine")
        with pytest.raises(InputError, match=f"mill: has .*{name}, which is of no selection; remove it, or give"):
            selected(folder)
        assert (root / name).read_text() == "mine"
        (root / name).unlink()


@pytest.mark.parametrize(
    ("manifest", "told"),
    [
        ("{}", "manifest.json: parts: expected a list, got None"),
        (
            '{"parts": [{"sha256": "0"}]}',
            "manifest.json: parts.0: expected a table and its sha256, got {'sha256': '0'}",
        ),
    ],
)
def test_a_damaged_manifest_is_told(folder: Path, manifest: str, told: str) -> None:
    selected(folder)
    (folder / "run" / "measures" / "mill" / "manifest.json").write_text(manifest)
    for ask in (lambda: selected(folder), lambda: table_rows(str(folder / "run"), "web/a.parquet", bytes(16))):
        with pytest.raises(InputError, match=told):
            ask()


def test_the_proof_of_a_purge_names_tables_that_no_manifest_lists(folder: Path) -> None:
    selected(folder)
    root = folder / "run" / "measures"
    (root / "zz" / ".work" / "weighed").mkdir(parents=True)
    (root / "zz" / ".work" / "weighed" / "000000").write_bytes(b"")
    names = ("zz/.work/copy.parquet", "zz/part-00000.parquet", "mill/part-00009.parquet")
    for name in names:
        shutil.copy(root / "mill" / "part-00000.parquet", root / name)

    def found() -> set[str]:
        return {name for name, _ in strangers(str(folder / "run"), None) if name.startswith("measures")}

    assert found() == {f"measures/{name}" for name in names}
    shutil.copy(root / "mill" / "part-00000.parquet", root / "mill" / "part-00001.parquet")
    assert found() == {f"measures/{name}" for name in (*names, "mill/part-00001.parquet")}


def test_another_number_of_documents_does_not_count_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--keep-documents: expected at most \d+, what documents of 1 words and more"):
        selected(folder, keep_documents=10**6)
    done: list[str] = []
    monkeypatch.setattr(module, "weigh", noting(done, module.weigh))
    assert selected(folder)["chosen"] == K
    assert done == []


def test_a_selection_that_is_complete_is_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = selected(folder)
    (folder / "run" / "measures" / "mill" / ".work").mkdir()  # its removal was cut off
    monkeypatch.setattr(module, "_passes", None)
    shutil.move(folder / "target.jsonl", folder / "moved.jsonl")
    again = selected(folder, targets=(str(folder / "moved.jsonl"),))
    assert again == first
    assert not (folder / "run" / "measures" / "mill" / ".work").exists()
    for more, told in (
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"keep_documents": 5}, r'keep is {"documents": 20} there and {"documents": 5} here'),
        ({"num_buckets": 51}, "buckets is 50 there and 51 here"),
        ({"sources": ("web",)}, r'sources is \["text", "web"\] there and \["web"\] here'),
    ):
        with pytest.raises(InputError, match=f"manifest.json: holds another selection: {told}; give another --name"):
            selected(folder, targets=(str(folder / "moved.jsonl"),), **more)
    part = folder / "run" / "measures" / "mill" / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(InputError, match=r"part-00001.parquet: is missing or changed: .*; remove .*measures/mill"):
        selected(folder, targets=(str(folder / "moved.jsonl"),))


# ---- targets


def test_targets_of_every_kind_are_counted_alike(folder: Path) -> None:
    """The same texts as JSON lines, compressed too, as Parquet, as plain files and in a data run give equal weights."""
    texts = target_of(folder)
    pq.write_table(pa.table({"body": texts}), folder / "target.parquet")
    with gzip.open(folder / "target.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"text": text}) + "\n" for text in [*texts, ""]))
    (folder / "plain" / "below").mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / "plain" / ("below" if number % 2 else "") / f"{number}.txt").write_text(text)
    selected(folder)
    expected = {row["doc_id"]: row["log_weight"] for row in rows_of(folder / "run", "mill")}
    for name, more in {
        "parquet": {"targets": (str(folder / "target.parquet"),), "text_field": "body"},
        "gzip": {"targets": (str(folder / "target.jsonl.gz"),)},
        "folder": {"targets": (str(folder / "plain"),)},
        "parts": {"targets": (str(folder / "plain" / "below"), str(folder / "plain" / "*.txt"))},
    }.items():
        assert selected(folder, name=name, **more)["target_features"] == 40 * 23, name
        assert {row["doc_id"]: row["log_weight"] for row in rows_of(folder / "run", name)} == expected, name


def test_a_data_run_is_a_target(written: tuple[Path, Listing], folder: Path) -> None:
    """Of its own documents: then all weights are equal."""
    shutil.copytree(folder / "run", folder / "other")
    manifest = selected(folder, targets=(str(folder / "other"),))
    assert {row["log_weight"] for row in rows_of(folder / "run", "mill")} == {0.0}
    assert manifest["effective_size"] == pytest.approx(manifest["documents"])
    assert manifest["target_features"] == manifest["features"]
    assert manifest["targets"][0]["run_id"] == "topics"


# ---- wrong requests


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"name": "../mill"}, r"--name: expected lower-case letters, digits and _, .*, got '../mill'"),
        ({"name": "spans"}, r"--name: .* none of documents, shards and spans, got 'spans'"),
        ({"name": "like-wiki"}, r"--name: .*, got 'like-wiki'"),
        ({"name": "table"}, "--name: expected no keyword of SQL, .*, got 'table'"),
        ({"name": "left"}, "--name: expected no keyword of SQL, .*, got 'left'"),
        ({"targets": ("{0}",)}, "own: of a folder only plain texts are read; give .*jsonl by itself"),
        ({"targets": ("{0}/run", "{0}/run/")}, "--target: expected each data run once, got .*run/? twice"),
        ({"keep_documents": 1, "keep_tokens": 1}, "expected --target, and one of --keep-documents and --keep-tokens"),
        ({"targets": ()}, "expected --target, and one of"),
        ({"keep_tokens": 1}, "--keep-tokens: expected more: the first document alone has more than 1"),
        ({"sources": ("books",)}, r"run has no source 'books' \(it has text, web\)"),
        ({"targets": ("{0}/none.jsonl",)}, "none.jsonl: matches no file"),
        ({"targets": ("{0}/target.docx",)}, r"--target: expected a data run, a folder of texts or a file of .parquet"),
        (
            {"targets": ("{0}/target.jsonl", "{0}/*.jsonl")},
            "--target: expected each file once, got .*target.jsonl twice",
        ),
        ({"text_field": "body"}, "target.jsonl: record 0: body: expected a text, got read.no_field"),
        ({"targets": ("{0}/bad/bad.jsonl",)}, "bad.jsonl: record 1: text: expected a text, got read.bad_json"),
        ({"targets": ("{0}/bad/bad.parquet",)}, "bad.parquet: is damaged at 0: not a readable Parquet file"),
        ({"targets": ("{0}/bad/empty.jsonl",)}, "the target has no words"),
    ],
)
def test_what_cannot_be_is_told(folder: Path, more: dict[str, Any], told: str) -> None:
    (folder / "bad").mkdir()
    (folder / "bad" / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "bad" / "bad.parquet").write_text("PAR1")
    (folder / "bad" / "empty.jsonl").write_text("\n")
    if "targets" in more:
        more = {**more, "targets": tuple(path.replace("{0}", str(folder)) for path in more["targets"])}
    with pytest.raises(InputError, match=told):
        selected(folder, **more)


def test_a_run_that_is_no_complete_one_is_told(folder: Path) -> None:
    with pytest.raises(InputError, match="own: expected a complete data run"):
        select(Selection(str(folder), "mill", (str(folder / "target.jsonl"),), 1), workers=1)
    shutil.rmtree(folder / "run" / "documents" / "web")
    with pytest.raises(InputError, match="run: source web: has no texts; expected some in documents/web/"):
        selected(folder)


@pytest.mark.long
@pytest.mark.ray
def test_with_ray_the_bytes_are_the_same(folder: Path) -> None:
    selected(folder)
    first = files_of(folder / "run", "mill")
    shutil.rmtree(folder / "run" / "measures")
    select(asked(folder), workers=2, tell=lambda line: None)
    assert files_of(folder / "run", "mill") == first
