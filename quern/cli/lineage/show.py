"""``quern lineage show``: the complete history of one document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from quern.cli.lineage.sql import table_console
from quern.cli.open_run import open_run
from quern.cli.output import JSON, columns, json_stdout, plain, plain_line, reports_errors
from quern.errors import InputError
from quern.words import counted

__all__ = ["show"]

#: Characters of a text, and changes of a difference, that the terminal is shown; --full and --json have more.
_TEXT_CHARS = 2000
_CHANGES = 12
_FIELD_CHARS = 400

_STYLES = {"removed": "red strike", "kept": "green", "same": "dim"}

Row = Mapping[str, Any]


@reports_errors
def show(
    run: Annotated[str, typer.Argument(help="A data run.", metavar="RUN")],
    url: Annotated[str | None, typer.Option(help="Its URL, in any spelling.")] = None,
    doc: Annotated[str | None, typer.Option(help="Its doc_id: 32 hex digits.")] = None,
    shard: Annotated[
        str | None,
        typer.Option(
            help="The shard that has it: RUN/tokens/<source>/shard_00000.bin, <source>/shard_00000, or a number."
        ),
    ] = None,
    token: Annotated[int | None, typer.Option(min=0, help="Token position in the shard.")] = None,
    source: Annotated[str | None, typer.Option(help="With a shard's number: <source>, or <source>.val.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Print the whole text, whatever its length.")] = False,
    json: bool = JSON,
) -> None:
    """Print everything known of a document of RUN: the record, every measurement with its limits, why it was kept or
    dropped, its duplicates and how they differ, its token span and text, and the training runs that read from RUN."""
    from quern.lineage.answers.show import show_answer
    from quern.lineage.trace import TEXT_CHARS

    if sum(value is not None for value in (url, doc, shard)) != 1:
        raise InputError("expected one of --url, --doc and --shard with --token")
    if (shard is None) is not (token is None) or (shard is None and source is not None):
        raise InputError("expected --shard and --token together; --source goes with them")
    with json_stdout(json) as emit:
        chars = None if full else TEXT_CHARS if json else _TEXT_CHARS
        answer = show_answer(open_run(run), url=url, doc=doc, shard=shard, token=token, source=source, text_chars=chars)
        emit(answer)
        if not json and answer["document"] is None:
            _print_several(table_console(), answer["found"], answer["documents"])
        elif not json:
            _print(table_console(), answer["document"], answer["position"])


# ---- the terminal


def _short(text: str) -> str:
    return plain_line(text, _FIELD_CHARS)


def _print_several(console: Console, found: int, listed: list[dict[str, Any]]) -> None:
    console.print(Text(f"{counted(found, 'document')}; choose one with --doc:"))
    console.print()
    table = columns("doc_id", "fetched", "outcome", "source", "url", unbroken=["doc_id"])
    for row in listed:
        cells = (row["doc_id"], row["fetched_at"], row["outcome"], row["source"], row["url"])
        table.add_row(*(Text(_short(str(cell or "–"))) for cell in cells))
    console.print(table)
    if found > len(listed):
        console.print(Text(f"and {found - len(listed):,} more"))


def _print(console: Console, life: Row, position: int | None) -> None:
    for name, value in _facts(life, position):
        if value is not None:
            console.print(Text.assemble((f"{name:<11}", "bold"), _short(str(value))))
    _print_measures(console, life["measures"])
    for name, own in life["rules"].items():
        options = ", ".join(f"{key} {value}" for key, value in (own["options"] or {}).items())
        console.print(Text(_short(f"{name}: {own['rule']}" + (f" with {options}" if options else ""))))
    _print_change(console, life["change"])
    _print_duplicates(console, life["duplicates"])
    _print_text(console, life["text"])


def _facts(life: Row, position: int | None) -> Iterator[tuple[str, Any]]:
    record, language = life["record"], life["language"]
    yield "url", life["url"]
    yield "canonical", life["canonical_url"] if life["canonical_url"] != life["url"] else None
    yield "surt", life["surt"]
    yield "document", f"{life['doc_id']}  source {life['source']}"
    yield "file", record["file"]
    if record["offset"] is not None:
        length = f", {record['length']:,} bytes" if record["length"] is not None else ""
        yield "record", f"at byte {record['offset']:,}{length}  {record['id'] or ''}".rstrip()
    else:
        yield "record", record["id"]
    yield "fetched", record["fetched_at"]
    yield "payload", "  ".join(filter(None, (record["payload_digest"], record["charset"]))) or None
    if language["code"] is not None:
        yield "language", language["code"] + (f"  {language['score']:.3f}" if language["score"] is not None else "")
    yield "extracted", life["pre_filter_hash"]
    yield "final", life["post_filter_hash"]
    yield "outcome", life["outcome"]
    yield "failed", ", ".join(life["failed_rules"]) or None
    yield "span", _span(life["span"], position)
    for own in life["selections"]:
        rank = "" if own["rank"] is None else f", rank {own['rank']:,}"
        yield (
            "selection",
            f"{own['name']}: {'chosen' if own['chosen'] else 'not chosen'}, log weight {own['log_weight']:.6g}{rank}",
        )
    for number, path in enumerate(life["training_runs"]):
        yield ("read by" if number == 0 else ""), path


def _span(span: Row | None, position: int | None) -> str | None:
    if span is None:
        return None
    notes = ["held out"] if span["held_out"] else []
    notes += [f"purged since corpus version {span['purged_since']}"] if span["purged"] else []
    text = f"{span['file']} tokens {span['start']:,} to {span['start'] + span['length']:,}"
    here = f"; the token is number {position:,} of it" if position is not None else ""
    return text + here + (f"  ({', '.join(notes)})" if notes else "")


def _print_measures(console: Console, measures: list[dict[str, Any]]) -> None:
    if not measures:
        return
    console.print()
    table = columns("measurement", "value", "passes", "", unbroken=["measurement"])
    for own in measures:
        cells = (own["name"], _measure(own["value"]), _limit(own["limit"]), "failed" if own["failed"] else "")
        table.add_row(*map(Text, map(_short, cells)), style="bold red" if own["failed"] else "")
    console.print(table)


def _measure(value: Any) -> str:
    """A number, or what a table of another version of quern has there."""
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, int | float) else str(value)


def _limit(limit: Row | None) -> str:
    if limit is None:
        return ""
    parts = [f"{sign} {limit[name]:g}" for name, sign in (("least", "≥"), ("most", "≤")) if limit[name] is not None]
    return ", ".join(parts)


def _print_change(console: Console, change: Row | None) -> None:
    if change is None:
        return
    was = change["was_removed"]
    since = f", removed before: {_evidence(was)} duplicate of {was['duplicate_of']}" if was else ""
    console.print()
    console.print(Text(f"{change['action']} by corpus version {change['version']}{since}"))


def _print_duplicates(console: Console, duplicates: Row) -> None:
    decision, removed = duplicates["decision"], duplicates["removed"]
    if duplicates["cluster"] is not None:
        console.print()
        cluster = duplicates["cluster"]
        console.print(Text(f"cluster {cluster['id']} of {counted(cluster['documents'], 'document')}"))
    if decision is not None:
        survivor = decision["survivor"]
        console.print(Text(f"removed: {_evidence(decision)} duplicate of {survivor['doc_id']}"))
        console.print(Text(f"  {_short(survivor['url'] or '–')}"))
        _print_difference(console, decision["difference"])
    if duplicates["removed_count"]:
        console.print(Text(f"in its favour {counted(duplicates['removed_count'], 'document')} went:"))
    for other in removed:
        console.print(Text(f"- {other['doc_id']}  {_evidence(other)}  {_short(other['url'] or '–')}"))
        _print_difference(console, other["difference"])
    if duplicates["removed_count"] > len(removed):
        console.print(Text(f"and {duplicates['removed_count'] - len(removed):,} more"))


def _evidence(decision: Row) -> str:
    facts = [str(decision["kind"])]
    facts += [f"similarity {decision['similarity']:.3f}"] if decision["similarity"] is not None else []
    facts += [f"band {decision['band']}"] if decision["band"] is not None else []
    return _short(", ".join(facts))


def _print_difference(console: Console, difference: Row | None) -> None:
    if difference is None:
        console.print(Text("  (one of the texts is not stored any more)", "dim"))
        return
    words = f"{difference['removed_words']:,} words, {difference['kept_words']:,} in what was kept"
    if not difference["complete"]:
        words += "; too long or too different to be compared to the end"
    if not difference["pieces"]:
        equal = "the same text" if difference["equal"] else "the same words" if difference["complete"] else "no change"
        console.print(Text(f"  {equal}: {words}", "dim"))
        return
    changed = f"{difference['only_removed']:,} only here, {difference['only_kept']:,} only in what was kept"
    console.print(Text(f"  {changed}; {words}", "dim"))
    line = Text("  ")
    for piece in difference["pieces"][:_CHANGES]:
        marks = {"removed": ("[-", "-] "), "kept": ("{+", "+} "), "same": ("", " ")}[piece["kind"]]
        line.append(marks[0] + _short(piece["text"]) + marks[1], _STYLES[piece["kind"]])
    if len(difference["pieces"]) > _CHANGES:
        line.append("…", "dim")
    console.print(line)


def _print_text(console: Console, text: Row) -> None:
    console.print()
    if text["text"] is None:
        console.print(Text(f"no text: {text['why_none']}", "dim"))
        return
    origin = "decoded from its tokens" if text["from"] == "tokens" else "as stored; it has no tokens"
    shown = "" if text["complete"] else f", the first {len(text['text']):,} characters (--full shows all)"
    console.print(Text(f"text, {origin}{shown}:", "bold"))
    console.print(Text(plain(text["text"])))
    if text["same"] is False:
        console.print(Text("this is not the text that was judged: its hash is another", "bold red"))
