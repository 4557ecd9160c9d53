"""The demo's comparison of verdicts with what is expected: a page that was judged otherwise is complained of."""

from __future__ import annotations

from typing import Any

import pytest

from quern.cli.demo.check import KindResult, PageOutcome, compare
from quern.demo import SitePage

KEPT = PageOutcome({"stage": None, "pii.emails": 1}, "a text", None)
NEAR = PageOutcome({"stage": None}, None, "near")
SPAM = PageOutcome({"stage": "quality", "reason": "repetition.dup_line_frac"}, None, None)


def judged(expected: dict[str, Any], *outcomes: PageOutcome) -> KindResult:
    group = "pair" if "duplicate" in expected else None
    pages = [
        SitePage(f"https://a.test/{n}", "kind", "en", str(n), "f", group, {"what": "", **expected}, ())
        for n in range(len(outcomes))
    ]
    (result,) = compare(pages, {str(n): outcome for n, outcome in enumerate(outcomes)})
    assert result.pages == result.actual.total() == len(outcomes)
    return result


@pytest.mark.parametrize(
    ("expected", "outcomes"),
    [
        ({}, [KEPT]),
        ({"at_least": {"pii.emails": 1}, "present": ["text"], "absent": ["tests"]}, [KEPT]),
        ({"dropped": ["language: ", "quality: repetition."]}, [SPAM]),
        ({"duplicate": "near"}, [NEAR, KEPT]),
    ],
)
def test_what_was_expected_is_not_complained_of(expected: dict[str, Any], outcomes: list[PageOutcome]) -> None:
    assert judged(expected, *outcomes).wrong == []


@pytest.mark.parametrize(
    ("expected", "outcomes", "complaint"),
    [
        ({}, [SPAM], "0: expected kept, got quality: repetition.dup_line_frac"),
        ({}, [NEAR], "0: expected kept, got duplicate (near)"),
        ({"dropped": ["language: ", "quality: "]}, [KEPT], "0: expected dropped (language or quality), got kept"),
        ({"dropped": ["quality: c4."]}, [SPAM], "(quality: c4), got quality: repetition.dup_line_frac"),
        ({"dropped": ["quality: "]}, [NEAR], "got duplicate (near)"),
        ({"duplicate": "near"}, [KEPT, KEPT], "expected one of two kept (near), got kept and kept"),
        ({"duplicate": "exact"}, [KEPT, NEAR], "expected one of two kept (exact), got kept and duplicate (near)"),
        ({"at_least": {"pii.emails": 2}}, [KEPT], "0: pii.emails: expected ≥ 2, got 1"),
        ({"present": ["poem"]}, [KEPT], "expected 'poem' in its text"),
        ({"absent": ["a te"]}, [KEPT], "did not expect 'a te' in its text"),
    ],
)
def test_what_was_not_expected_is(expected: dict[str, Any], outcomes: list[PageOutcome], complaint: str) -> None:
    (wrong,) = judged(expected, *outcomes).wrong
    assert complaint in wrong
