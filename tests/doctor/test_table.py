"""What is shown fits a screen, names what was found, and carries nothing out of a machine's texts to the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from quern.cli.doctor.table import show
from quern.doctor.fleet import judge
from quern.doctor.readings import Device, Disk, Link, Problem, Reading
from quern.doctor.run import Result


def shown(readings: list[Reading], links: list[Link] | None = None) -> str:
    console = Console(file=io.StringIO(), width=120)
    links = links or []
    show(Result(readings, links, judge(readings, links), len(readings)), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_five_hundred_ranks_with_as_many_findings_fit_a_screen() -> None:
    ranks = [
        Reading(
            rank=rank, node=f"node-{rank // 8}", local_rank=rank % 8, facts={} if rank % 8 else {"driver": "a"},
            devices=[Device(name=f"cuda:{rank % 8}", kind="H100", speeds={"product bf16": [7e14]}, ecc_errors=1)],
        )
        for rank in range(512)
    ]  # fmt: skip
    text = shown(ranks, [Link(kind="pair", ranks=[0, to], speeds=[speed]) for to, speed in ((8, 4e10), (16, 3e10))])
    assert len(text.splitlines()) < 40
    assert "512 findings: 64 nodes, 512 ranks" in text
    assert "node-0, cuda:0: 1 uncorrected memory errors" in text
    assert "and 492 more (--json)" in text
    assert text.count("reset the GPU") == 1
    assert "30 GB/s" in text


def test_texts_of_machines_are_only_texts() -> None:
    bad = "evil\x1b[2J\n[red]x[/red]\u202e"
    reading = Reading(
        rank=0,
        node=bad,
        facts={bad: bad},
        shown={bad: bad},
        problems=[Problem(code="store", text=bad)],
        disks=[Disk(path=bad, total=9, free=1)],
    )
    text = shown([reading, Reading(rank=1, node=bad, facts={bad: "else"})])
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]x[/red]" in text


def test_machines_of_data_runs_stand_node_by_node() -> None:
    machines = [
        Reading(
            rank=n,
            node=f"node-{n}",
            facts={"ray": "2.60.0"},
            shown={"cores": f"{8 * n}"},
            disks=[Disk(path="/d", total=1 << 40, free=1 << 39)],
        )
        for n in range(3)
    ]
    text = shown(machines)
    assert "node-2           16 cores, memory unknown, /d 512.0 GiB of 1.0 TiB free" in text
    assert text.count("/d 512.0 GiB of 1.0 TiB free") == 3
