"""``quern lineage show``: what the terminal is shown of a page, hostile ones too; JSON; wrong arguments in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from quern.cli.lineage.show import show
from quern.data_pipeline.page.document import content_hash
from quern.data_pipeline.page.url import host, surt
from quern.errors import InputError
from quern.lineage.store import IndexedRun
from support.lineage.runs import Listing, listing, write_listing

HOSTILE_TEXT = "fine\n\x1b[2J\x1b]0;owned\x07 \u202eevil\u202c [bold red]markup[/] \x00\x9b31m\r<b>&amp;</b>\nend"
HOSTILE_URL = "http://example.com/\x1b[31m\u202e[red]x\r\n"
LONG_TEXT = "".join(f"{number:05d} " for number in range(50_000))  # 300,000 characters

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def set_text(found: Listing, row: dict[str, Any], text: str) -> None:
    """Give a page another text, in every table."""
    found.texts[row["doc_id"]] = text
    row["post_filter_hash"] = row["pre_filter_hash"] = content_hash(text)
    for part in found.documents.values():
        for stored in part:
            if stored["doc_id"] == row["doc_id"]:
                stored |= {"text": text, "extracted": None}
    for spans in found.spans.values():
        start = 0
        for span in spans:
            span["length"] = len(found.texts[span["doc_id"]].encode()) + 1
            span["start"], start = start, start + span["length"]


def set_url(row: dict[str, Any], url: str, canonical: str) -> None:
    row |= {"url": url, "canonical_url": canonical, "surt": surt(canonical), "host": host(canonical)}


@pytest.fixture(scope="module")
def found() -> Listing:
    """Of the documents with tokens the first is hostile, the second long; two others share a URL with a third that
    was dropped."""
    found = listing(seed=21, documents=60, files=1, sources=("web",), shard_tokens=10**9)
    rows = {row["doc_id"]: row for row in found.verdicts["web/part-000.warc.gz"]}
    placed = [rows[span["doc_id"]] for span in found.spans["web"] if not span["purged"]]
    set_text(found, placed[0], HOSTILE_TEXT)
    set_url(placed[0], HOSTILE_URL, "http://example.com/%1B[31m%E2%80%AE[red]x")
    placed[0]["charset"] = "utf-8\x1b[7m"
    placed[0]["record_id"] = "<urn:\u2066x>"
    set_text(found, placed[1], LONG_TEXT)
    dropped = next(row for row in rows.values() if row["stage"] == "quality")
    for row in (placed[2], placed[3], dropped):
        set_url(row, "http://example.net/twice", "http://example.net/twice")
    return found


@pytest.fixture(scope="module")
def run(found: Listing, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("show") / "run"
    write_listing(folder, found, identity="x")
    record = json.loads((folder / "run.json").read_text())
    record["config"]["quality"] = {
        "action": "drop", "order": ["gopher"], "gopher": {"min_mean_word_length": 3.0, "max_mean_word_length": 10},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(record))
    line = {"time": "t", "train_run": "/train/\x1b[31mone", "order": "o", "identities": []}
    (folder / "consumers.jsonl").write_text(json.dumps(line) + "\n")
    IndexedRun(str(folder))  # builds the index
    return str(folder)


def placed(found: Listing, number: int) -> str:
    return [span["doc_id"].hex() for span in found.spans["web"] if not span["purged"]][number]


def call(run: str, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(show)
    return CliRunner().invoke(app, [run, *arguments])


Shown = Callable[..., dict[str, Any]]


@pytest.fixture
def shown(run: str, json_of: Callable[..., Any]) -> Shown:
    return partial(json_of, call, run)


def test_a_hostile_page_is_shown_without_moving_the_cursor(run: str, found: Listing) -> None:
    result = call(run, "--doc", placed(found, 0))
    assert result.exit_code == 0
    assert CONTROL.search(result.output) is None
    assert "\\x1b[2J\\x1b]0;owned\\x07 \\u202eevil" in result.output
    assert "[bold red]markup[/] \\x00\\x9b31m\\r<b>&amp;</b>\nend" in result.output
    assert "url        http://example.com/\\x1b[31m\\u202e[red]x\\r\\n\n" in result.output
    assert "utf-8\\x1b[7m" in result.output
    assert "<urn:\\u2066x>" in result.output
    assert "read by    /train/\\x1b[31mone" in result.output


def test_of_an_unfinished_run_it_is_said_that_it_is(run: str, tmp_path: Path) -> None:
    unknown = ("--url", "http://nowhere.example/")
    assert "not complete" not in call(run, *unknown).stderr
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    record = json.loads((copy / "run.json").read_text())
    (copy / "run.json").write_text(json.dumps({**record, "status": "running"}))
    result = call(str(copy), *unknown)
    assert result.exit_code == 2 or isinstance(result.exception, InputError)
    told = f"note: {copy}: the run is not complete; what it has written so far is read"
    assert told in result.stderr.replace("\n", " ")


def test_json_has_the_text_as_it_is(shown: Shown, found: Listing) -> None:
    got = shown("--doc", placed(found, 0))
    assert got["document"]["text"]["text"] == HOSTILE_TEXT
    assert got["document"]["text"]["same"] is True
    assert got["document"]["url"] == HOSTILE_URL
    assert got["document"]["training_runs"] == ["/train/\x1b[31mone"]
    assert (got["found"], len(got["documents"]), got["position"]) == (1, 1, None)


def test_the_facts_of_a_kept_page_are_on_the_terminal(run: str, found: Listing) -> None:
    doc_id = bytes.fromhex(placed(found, 4))
    row = next(row for row in found.rows if row["doc_id"] == doc_id)
    span = next(span for span in found.spans["web"] if span["doc_id"] == doc_id)
    output = call(run, "--doc", doc_id.hex()).output
    assert f"document   {doc_id.hex()}  source web" in output
    assert f"file       {row['source_file']}" in output
    assert f"record     at byte {row['record_offset']:,}, {row['record_length']:,} bytes" in output
    assert f"fetched    {row['fetched_at'].isoformat()}" in output
    assert f"final      {row['post_filter_hash'].hex()}" in output
    assert "outcome    kept" in output
    assert (
        f"span       {run}/tokens/web/shard_00000.bin tokens {span['start']:,} to {span['start'] + span['length']:,}"
        in output
    )
    assert "text, decoded from its tokens:" in output


def test_failed_measures_are_marked_beside_their_limits(run: str, found: Listing) -> None:
    output = call(run, "--doc", placed(found, 4)).output
    line = next(line for line in output.splitlines() if line.startswith("gopher.mean_word_length"))
    assert "≥ 3, ≤ 10" in line
    assert "failed" not in line
    dropped = next(row for row in found.rows if row["stage"] == "quality")
    output = call(run, "--doc", dropped["doc_id"].hex()).output
    assert "outcome    quality: gopher.too_short" in output
    line = next(line for line in output.splitlines() if line.startswith("failed"))
    assert line == "failed     gopher.too_short"
    assert "text, as stored; it has no tokens" in output


def test_a_long_text_is_cut_on_the_terminal_and_in_json_and_whole_with_full(
    run: str, shown: Shown, found: Listing
) -> None:
    doc = placed(found, 1)
    output = call(run, "--doc", doc).output
    assert "the first 2,000 characters (--full shows all):" in output
    assert LONG_TEXT[:2000] in output
    assert LONG_TEXT[:2001].rstrip() + "0" not in output
    text = shown("--doc", doc)["document"]["text"]
    assert (text["text"], text["complete"]) == (LONG_TEXT[:200_000], False)
    text = shown("--doc", doc, "--full")["document"]["text"]
    assert (text["text"], text["complete"], text["same"]) == (LONG_TEXT, True, True)
    output = call(run, "--doc", doc, "--full").output
    assert LONG_TEXT.strip() in output
    assert "--full" not in output


def test_several_documents_of_a_url_are_listed_newest_first(run: str, shown: Shown, found: Listing) -> None:
    rows = [row for row in found.rows if row["url"] == "http://example.net/twice"]
    rows.sort(key=lambda row: row["fetched_at"], reverse=True)
    got = shown("--url", "HTTP://www.example.net/../twice/".replace("www.", "").removesuffix("/"))
    assert [own["doc_id"] for own in got["documents"]] == [row["doc_id"].hex() for row in rows]
    assert (got["found"], got["document"]) == (3, None)
    output = call(run, "--url", "http://example.net/twice#part").output
    assert "3 documents; choose one with --doc:" in output
    places = [output.index(row["doc_id"].hex()) for row in rows]
    assert places == sorted(places)
    assert "quality: gopher.too_short" in output


def test_a_token_of_a_shard_leads_to_its_document(run: str, shown: Shown, found: Listing) -> None:
    span = found.spans["web"][6]
    at = str(span["start"] + 2)
    for arguments in (
        ("--shard", f"{run}/tokens/web/shard_00000.bin"),
        ("--shard", "web/shard_00000"),
        ("--shard", "0", "--source", "web"),
    ):
        got = shown(*arguments, "--token", at)
        assert (got["document"]["doc_id"], got["position"]) == (span["doc_id"].hex(), 2)
        assert "the token is number 2 of it" in call(run, *arguments, "--token", at).output


def test_duplicates_are_shown_with_what_differs(run: str, found: Listing) -> None:
    texts = found.texts
    near = next(
        decision
        for decision in found.decisions
        if decision["kind"] == "near" and texts[decision["doc_id"]].split() != texts[decision["duplicate_of"]].split()
    )
    output = call(run, "--doc", near["doc_id"].hex()).output
    assert "outcome    duplicate: near" in output
    assert f"removed: near, similarity {near['similarity']:.3f}" in output
    assert f"duplicate of {near['duplicate_of'].hex()}" in output
    assert "only in what was kept" in output
    assert CONTROL.search(output) is None
    output = call(run, "--doc", near["duplicate_of"].hex()).output
    assert f"- {near['doc_id'].hex()}  near, similarity {near['similarity']:.3f}" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected one of --url, --doc and --shard with --token"),
        (("--url", "http://x/", "--doc", "0" * 32), "expected one of --url"),
        (("--shard", "web/shard_00000"), "expected --shard and --token together"),
        (("--doc", "0" * 32, "--token", "3"), "expected --shard and --token together"),
        (("--doc", "0" * 32, "--source", "web"), "--source goes with them"),
        (("--doc", "0" * 32), f"has no document {'0' * 32}"),
        (("--doc", "xyz"), "doc: expected 32 hex digits, got 'xyz'"),
        (("--shard", "\x1b[31m/shard_00000", "--token", "0"), "has no source"),
        (("--url", "http://example.net/\x1b[31mnot"), "has no document with the URL http://example.net/%1B[31mnot; it"),
        (("--url", "http://example.com/\x1b[31m\u202e[red]y"), r"\x1b[31m\u202e[red]x\r\n"),
    ],
)
def test_wrong_arguments_are_one_safe_line(run: str, arguments: tuple[str, ...], message: str) -> None:
    result = call(run, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert CONTROL.search(result.stderr) is None
    assert result.stdout == ""


def test_what_is_no_data_run_is_said(tmp_path: Path) -> None:
    result = call(str(tmp_path / "nothing"), "--doc", "0" * 32)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
