"""Compares a demo run with the verdicts expected for each kind of page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quern import storage
from quern.demo import SitePage
from quern.storage.parquet import read_table

__all__ = ["KindResult", "PageOutcome", "compare", "read_outcomes"]


@dataclass(frozen=True)
class PageOutcome:
    """What became of one page: its verdict row, its final text if stored, how it was removed as a duplicate."""

    verdict: Mapping[str, Any]
    text: str | None
    duplicate: str | None

    def __str__(self) -> str:
        if self.duplicate:
            return f"duplicate ({self.duplicate})"
        return "kept" if self.verdict["stage"] is None else f"{self.verdict['stage']}: {self.verdict['reason']}"


@dataclass
class KindResult:
    """All pages of one kind."""

    kind: str
    what: str
    expected: str
    hard: bool
    pages: int = 0
    actual: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def read_outcomes(run_dir: str) -> dict[str, PageOutcome]:
    """record_id → outcome of every page of a small run."""

    def rows(folder: str) -> list[dict[str, Any]]:
        paths = storage.list_files(storage.join(run_dir, folder))
        return [row for path in paths for row in read_table(path).to_pylist()]

    texts = {row["doc_id"]: row["text"] for row in rows("documents")}
    kinds = {row["doc_id"]: row["kind"] for row in rows("duplicates/decisions.parquet")}
    return {
        row["record_id"]: PageOutcome(row, texts.get(row["doc_id"]), kinds.get(row["doc_id"]))
        for row in rows("verdicts")
    }


def compare(pages: Sequence[SitePage], outcomes: Mapping[str, PageOutcome]) -> list[KindResult]:
    """One result per kind, in its order in the manifest; ``wrong`` holds a sentence for each page that differs."""
    results: dict[str, KindResult] = {}
    pairs: dict[str, list[str]] = {}
    for page in pages:
        wish, outcome = page.expected, outcomes[page.record_id]
        result = results.setdefault(
            page.kind, KindResult(page.kind, wish["what"], _in_words(wish), wish.get("hard", False))
        )
        result.pages += 1
        result.actual[str(outcome)] += 1
        if page.group is not None:
            pair = pairs.setdefault(page.group, [])
            pair.append(str(outcome))
            if len(pair) == 2 and sorted(pair) != [f"duplicate ({wish['duplicate']})", "kept"]:
                result.wrong.append(f"{page.url}: expected {_in_words(wish)}, got {' and '.join(pair)}")
        else:
            result.wrong += [f"{page.url}: {complaint}" for complaint in _complaints(wish, outcome)]
    return list(results.values())


def _in_words(wish: Mapping[str, Any]) -> str:
    if "duplicate" in wish:
        return f"one of two kept ({wish['duplicate']})"
    return f"dropped ({' or '.join(part.strip(': .') for part in wish['dropped'])})" if "dropped" in wish else "kept"


def _complaints(wish: Mapping[str, Any], outcome: PageOutcome) -> Iterator[str]:
    if not str(outcome).startswith(tuple(wish.get("dropped", ["kept"]))):
        yield f"expected {_in_words(wish)}, got {outcome}"
    elif outcome.text is not None:
        for name, least in wish.get("at_least", {}).items():
            if outcome.verdict[name] < least:
                yield f"{name}: expected ≥ {least}, got {outcome.verdict[name]}"
        yield from (f"expected {part!r} in its text" for part in wish.get("present", ()) if part not in outcome.text)
        yield from (f"did not expect {part!r} in its text" for part in wish.get("absent", ()) if part in outcome.text)
