"""``quern plan --html``: what the page says is what the plan says, and it is a page."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from quern.model.config import ModelConfig
from quern.parallel.planning.bubble import makespan, timeline
from quern.planner.answer import answer
from quern.planner.candidates import Wish
from quern.planner.hardware import load_hardware
from quern.planner.memory.peak import State
from quern.planner.page import render
from quern.planner.search import Search


def page(wish: Wish, memory_gib: float = 80) -> tuple[str, Search]:
    hardware = load_hardware("h100").model_copy(update={"memory_gib": memory_gib, "title": "<script>alert(1)</script>"})
    found = Search(wish, State(), hardware)
    return render(answer(wish, State(), hardware, found, 1e12), found, wish, State(), hardware), found


def wish_of(**fixed: object) -> Wish:
    return Wish(ModelConfig(preset="llama3-8b").shape(128_256), 16, 8, 8192, 512, fixed={"cp": 1, "tp": 1, **fixed})


class Tags(HTMLParser):
    VOID = ("meta", "link", "line", "path", "br", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_of_a_pipeline() -> None:
    text, found = page(wish_of(pp=4))
    assert found.best is not None
    assert found.best.time is not None
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<script>alert" not in text
    assert f"{found.best.time.seconds:.2f} s" in text
    assert f"MFU</dt><dd>{found.best.time.mfu_full:.1%}" in text
    assert text.count("of the pipeline</span>") == 4
    rows = {float(y) for y in re.findall(r'<rect class="[FB][^"]*" x="[\d.]+" y="([\d.]+)"', text)}
    assert len(rows) == 4
    assert len(re.findall("<rect class", text)) <= 800


def test_the_page_without_a_pipeline_and_of_what_does_not_fit() -> None:
    text, _ = page(wish_of(pp=1))
    assert 'id="schedule"' not in text
    assert "every rank" in text
    text, found = page(wish_of(pp=1, checkpointing="full"), memory_gib=5)
    assert not found.fastest()
    assert "<h1>Short by" in text
    assert 'id="time"' not in text


@pytest.mark.parametrize(
    ("schedule", "stages", "number"), [("1f1b", 1, 8), ("interleaved_1f1b", 2, 8), ("gpipe", 1, 5)]
)
def test_the_work_that_is_drawn_is_the_work_that_is_timed(schedule: str, stages: int, number: int) -> None:
    times = [(1.0 + stage, 2.0 + stage, 1.0, 1.0) for stage in range(4 * stages)]
    work = timeline(schedule, 4, stages, number, times, 0.25)
    assert max(item.end for item in work) == makespan(schedule, 4, stages, number, times, 0.25)
    assert len(work) == 2 * 4 * stages * number
    for rank in range(4):  # one thing at a time
        own = sorted((item.start, item.end) for item in work if item.rank == rank)
        assert all(end <= start for (_, end), (start, _) in pairwise(own))
    assert {item.end - item.start for item in work if item.kind == "F"} == {1.0 + stage for stage in range(4 * stages)}
