"""A training run whose clock and faults are known, and a reading of a page of it."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from quern.mixtures.order import Order
from quern.mixtures.phases import Phase

STEPS, SEQ_LEN = 60, 16
ORDER = Order(
    [3, 1], [40, 9], 7, [Phase(30, (1, 2), 6, 6)], ids=["aa/web/1", "aa/books/1"], seq_len=SEQ_LEN, global_batch=4,
    block=4,
)  # fmt: skip
EVIL = '</script><script>alert(1)</script><img src=x onerror=alert(2)>" onload="x\u202e\x1b[31m'


class Made:
    """A run whose clock is ours. Attempt 0 is killed at 26 and goes on from 20, attempt 1 goes back from 45 to 40."""

    def __init__(self, path: Path, seed: int = 0, lr: float = 1e-3, source: str = "web") -> None:
        self.path, self.source, self.lr = path, source, lr
        self.random = np.random.default_rng(seed)
        self.now = datetime(2026, 11, 1, tzinfo=UTC)
        self.spent: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []
        path.mkdir()
        self.fact("order", hash=ORDER.hash, spec=ORDER.to_dict())
        self.attempt(0, "start", 0, 26, 0)
        self.wait(100, "between")
        self.attempt(1, "resume", 20, 45, 20)
        self.fact("stopped", step=45, signal="SIGTERM")
        self.wait(50, "between")
        self.attempt(2, "rollback", 40, STEPS, 47)
        self.fact("end", step=STEPS)
        config = f"steps: {STEPS}\noptimizer: {{lr: {lr}}}\nnote: {json.dumps(EVIL)}\n"
        (path / "config.yaml").write_text(config)
        (path / "run.json").write_text(json.dumps({"kind": "train", "layout": {"tp": 2}, "versions": {"quern": EVIL}}))
        self.write()

    def write(self) -> None:
        for name, rows in (("metrics", self.rows), ("ledger", self.ledger)):
            (self.path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def stamp(self) -> str:
        return self.now.isoformat(timespec="milliseconds")

    def wait(self, seconds: float, what: str) -> None:
        self.now += timedelta(seconds=seconds)
        self.spent[what] += seconds

    def fact(self, kind: str, **fields: Any) -> None:
        self.ledger.append({"time": self.stamp(), "kind": kind, **fields})

    def attempt(self, number: int, kind: str, first: int, stop: int, data: int) -> None:
        self.fact(kind, step=first, data_step=data, order=ORDER.hash)
        self.wait(8, "start")
        ends = {1: "again", 2: "abandoned"}.get(number + 1)
        lost = {0: 20, 1: 40}.get(number, STEPS)
        for step in range(first, stop):
            spike, bad = step in (12, 33), step == 50
            loss = 5 / (1 + step / 10) + float(self.random.normal(0, 0.1)) + 3 * spike + 0.001 * number
            seconds, parts = float(self.random.integers(500, 1500)) / 1000, {"data": 0.125, "communication": 0.0625}
            for what, part in (*parts.items(), ("compute", seconds - sum(parts.values()))):
                self.wait(part, str(ends) if step >= lost else "skipped" if step == 33 else what)
            where = {"step": step, "data_step": data + step - first}
            self.rows.append({
                "kind": "step", **where, "attempt": number, "loss": None if bad else loss, "grad_norm": 1 + 2.0 * spike,
                "lr": self.lr * (1 + step), "tokens": 64 * (step + 1), "tokens_per_s": 64 / seconds,
                "step_time_s": seconds, "data_wait_s": parts["data"], "memory_gib": 1.5, "mfu_full": None,
                "loss_spike": spike, "grad_norm_spike": False, "non_finite": bad, "skipped": step == 33,
                "slowest_rank": {"s": seconds},
                "ranks": {"comm_wait_s": {"median": parts["communication"]}},
                "source_loss": {self.source: loss + 1, "books": loss - 1}, "time": self.stamp(),
            })  # fmt: skip
            if spike:
                self.fact("spike", **where, loss=loss, grad_norm=3.0, loss_z=9.5, grad_norm_z=8.5)
            if step == 33:
                self.fact("skipped", **where, reason="spike")
            if bad:
                self.fact("non_finite", **where, loss=None, grad_norm=1.0)
            if (step + 1) % 15 == 0:
                self.wait(4, "validation")
                sources = {name: {"loss": loss + at, "tokens": 9} for at, name in enumerate((self.source, "books"))}
                self.rows.append({"kind": "validation", "step": step + 1, "loss": loss + 0.5 if not bad else None,
                                  "tokens": 18, "sources": sources, "time": self.stamp()})  # fmt: skip
            if (step + 1) % 10 == 0:
                name = f"step_{step + 1:08d}"
                self.fact("checkpoint", step=step + 1, data_step=data + step + 1 - first, name=name)
                self.wait(3, "saves")
                if step + 1 == 50:
                    self.fact("checkpoint_failed", step=50, why=EVIL)
                elif step + 1 < 30:
                    self.fact("good", step=step + 1, name=name)

    def present(self) -> dict[int, dict[str, Any]]:
        """By json alone, in the order of time: what each line of the ledger discards, what each attempt then writes."""
        rows = [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]
        moves = [entry for entry in self.ledger if entry["kind"] in ("start", "resume", "rollback")]
        found: dict[int, dict[str, Any]] = {}
        for number, move in enumerate(moves):
            found = {step: row for step, row in found.items() if step < move["step"]}
            found |= {row["step"]: row for row in rows if row["kind"] == "step" and row["attempt"] == number}
        return found


class Page(HTMLParser):
    """Tags, addresses, and the cells of tables by the section that they stand in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.policy = ""
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}
        self._section, self._inside, self.text = "", "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags[tag] += 1
        self.addresses += [
            value for name, value in given.items() if name in ("src", "href", "action", "data", "srcset")
        ]
        self.handlers += [name for name in given if name.startswith("on")]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        self._section = given["id"] if tag == "section" else self._section
        self._inside = tag if tag in ("script", "style", "td", "th") else self._inside
        if tag == "tr":
            self.rows.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self.rows[self._section][-1].append("")
        elif tag == "script":
            self.scripts.append("")
        elif tag == "style":
            self.styles.append("")

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "style":
            self.styles[-1] += data
        else:
            self.text += data
            rows = self.rows.get(self._section)
            if rows and rows[-1] and self._inside in ("td", "th"):
                rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style", "td", "th"):
            self._inside = ""

    @property
    def curves(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(next(own for own in self.scripts if own.startswith('{"charts"')))
        return found

    def line(self, label: str, chart: str = "Loss") -> dict[str, Any]:
        (found,) = (chart_ for chart_ in self.curves["charts"] if chart_["title"] == chart)
        (line,) = (line for line in found["series"] if line["label"] == label)
        return dict(line)

    def marks(self) -> dict[str, list[int]]:
        """The steps of each kind."""
        return {mark["label"]: mark["x"]["step"] for mark in self.curves["marks"]}
