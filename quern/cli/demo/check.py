"""Compares a demo run with the verdicts expected for each kind of page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    @property
    def kept(self) -> bool:
        """Whether it was tokenized."""
        return self.verdict["stage"] is None and self.duplicate is None

    def __str__(self) -> str:
        if self.duplicate:
            return f"duplicate ({self.duplicate})"
        return "kept" if self.kept else f"{self.verdict['stage']}: {self.verdict['reason']}"


@dataclass
class KindResult:
    """All pages of one kind."""

    kind: str
    what: str
    expected: str
    hard: bool
    pages: int = 0
    actual: dict[str, int] = field(default_factory=dict)
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
    """One result per kind, in the order of first appearance; ``wrong`` holds a sentence for each page that differs."""
    results: dict[str, KindResult] = {}
    groups: dict[str, list[tuple[SitePage, PageOutcome]]] = {}
    for page in pages:
        expected = page.expected
        result = results.setdefault(
            page.kind, KindResult(page.kind, expected["what"], _in_words(expected), bool(expected.get("hard")))
        )
        outcome = outcomes[page.record_id]
        result.pages += 1
        result.actual[str(outcome)] = result.actual.get(str(outcome), 0) + 1
        if page.group is not None:
            groups.setdefault(page.group, []).append((page, outcome))
            continue
        result.wrong += [f"{page.url}: {complaint}" for complaint in _complaints(expected, outcome)]
    for pair in groups.values():
        page, _ = pair[0]
        results[page.kind].wrong += _pair_complaints(pair)
    return list(results.values())


def _in_words(expected: Mapping[str, Any]) -> str:
    if expected["verdict"] == "one_kept":
        return f"one of two kept ({' or '.join(expected['duplicates'])})"
    if expected["verdict"] == "kept":
        return "kept"
    return f"dropped ({' or '.join(expected['stages'])})"


def _complaints(expected: Mapping[str, Any], outcome: PageOutcome) -> list[str]:
    if expected["verdict"] == "dropped":
        if outcome.kept or outcome.duplicate or outcome.verdict["stage"] not in expected["stages"]:
            return [f"expected {_in_words(expected)}, got {outcome}"]
        families = expected.get("families")
        if families and outcome.verdict["stage"] == "quality":
            rules = [rule for rule in outcome.verdict["failed_rules"] if rule.partition(".")[0] in families]
            return [] if rules else [f"expected a rule of {families}, got {outcome.verdict['failed_rules']}"]
        return []
    if not outcome.kept:
        return [f"expected kept, got {outcome}"]
    return _content_complaints(expected, outcome)


def _content_complaints(expected: Mapping[str, Any], outcome: PageOutcome) -> list[str]:
    text, counts = outcome.text or "", outcome.verdict
    found = [f"{n}: expected ≥ {v}, got {counts[n]}" for n, v in expected.get("at_least", {}).items() if counts[n] < v]
    some = expected.get("at_least_one_of")
    if some and not any(counts[name] for name in some):
        found.append(f"expected one of {some}")
    found += [f"expected {part!r} in its text" for part in expected.get("present", ()) if part not in text]
    found += [f"did not expect {part!r} in its text" for part in expected.get("absent", ()) if part in text]
    return found


def _pair_complaints(pair: Sequence[tuple[SitePage, PageOutcome]]) -> list[str]:
    page, _ = pair[0]
    kinds = page.expected["duplicates"]
    kept = [outcome for _, outcome in pair if outcome.kept]
    removed = [outcome for _, outcome in pair if outcome.duplicate in kinds]
    if len(kept) == 1 and len(removed) == 1:
        return []
    return [f"{page.url}: expected one of two kept, got " + " and ".join(str(outcome) for _, outcome in pair)]
