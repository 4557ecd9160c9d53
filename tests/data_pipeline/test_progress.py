"""The view of a running data run: lines off a terminal, a live view on one, and never an exception."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quern.data_pipeline.monitoring.phase import format_duration
from quern.data_pipeline.monitoring.progress import RunProgress
from support.waits import until

COUNTS = {"pages": 100, "kept": 30, "by_stage": {"language": 50, "quality": 20}}


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Recorder(Console):
    """A terminal that counts how often it is drawn on."""

    draws = 0

    def print(self, *args: object, **kwargs: object) -> None:
        self.draws += 1
        super().print(*args, **kwargs)  # type: ignore[arg-type]


def lines_of(interval_s: float = 30.0) -> tuple[RunProgress, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    return (
        RunProgress(console=Console(file=stream), clock=clock, interval_s=interval_s, background=False),
        clock,
        stream,
    )


def terminal(clock: Clock, width: int = 120) -> tuple[RunProgress, io.StringIO, Console]:
    stream = io.StringIO()
    console = Recorder(file=stream, force_terminal=True, record=True, width=width)
    return RunProgress(console=console, clock=clock, refresh_s=0.5, background=False), stream, console


def test_lines_come_at_the_start_at_intervals_and_at_the_end() -> None:
    progress, clock, stream = lines_of()
    progress.start_phase("pages", 4, 4 << 20)
    for _ in range(4):
        clock.now += 20
        progress.partition_done(COUNTS, 1 << 20)
    progress.end_phase()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "pages: 4 partitions, 4.0 MiB"
    assert lines[1].startswith("pages: 2/4 partitions (50%), 200 pages (5/s)")
    assert lines[2].startswith("pages: 4/4 partitions (100%)")
    assert lines[3].startswith("pages: done in 1 min 20 s, 4/4 partitions, 400 pages")
    assert len(lines) == 4


def test_funnel_so_far_is_a_share_of_all_pages_largest_drop_first() -> None:
    progress, clock, stream = lines_of()
    progress.start_phase("pages", 2, None)
    clock.now += 1
    progress.partition_done(COUNTS, 0)
    progress.partition_done({"pages": 100, "kept": 0, "by_stage": {"quality": 100}}, 0)
    progress.end_phase()
    assert "kept 15.0%, quality −60.0%, language −25.0%" in stream.getvalue()
    progress.start_phase("tokens", 4, None, num_resumed=3)
    assert stream.getvalue().endswith("tokens: 4 partitions, 3 of them done before\n")


def test_nothing_is_said_while_nothing_happens() -> None:
    progress, clock, stream = lines_of()
    progress.start_phase("pages", 4, None)
    clock.now += 31
    progress.partition_done(COUNTS, 0)
    before = stream.getvalue()
    clock.now += 1000
    progress.tick()
    assert stream.getvalue() == before


def test_estimate_is_a_dash_until_two_partitions_and_some_seconds_are_behind() -> None:
    progress, clock, stream = lines_of(interval_s=0.0)
    progress.start_phase("pages", 10, 1000)
    clock.now += 60
    progress.partition_done(COUNTS, 100)
    assert stream.getvalue().splitlines()[-1].endswith("ETA –")
    clock.now += 60
    progress.partition_done(COUNTS, 100)
    assert stream.getvalue().splitlines()[-1].endswith("ETA 8 min 00 s")  # 200 of 1000 bytes took 120 s


def test_estimate_goes_by_bytes_not_by_partitions() -> None:
    progress, clock, stream = lines_of(interval_s=0.0)
    progress.start_phase("pages", 4, 1000)
    clock.now += 50
    progress.partition_done(COUNTS, 400)
    progress.partition_done(COUNTS, 400)
    assert stream.getvalue().splitlines()[-1].endswith("ETA 12 s")  # 200 bytes left at 16 a second


def test_resumed_partitions_count_as_done_but_not_for_the_pace() -> None:
    progress, clock, stream = lines_of(interval_s=0.0)
    progress.start_phase("pages", 10, 1000)
    for _ in range(6):
        progress.partition_done(COUNTS, 100, resumed=True)
    clock.now += 10
    progress.partition_done(COUNTS, 100)
    assert stream.getvalue().splitlines()[-1].endswith("ETA –")
    progress.partition_done(COUNTS, 100)
    last = stream.getvalue().splitlines()[-1]
    assert "8/10 partitions (80%), 800 pages (20/s)" in last
    assert last.endswith("ETA 10 s")  # 200 bytes left; this attempt does 20 a second


def test_an_error_is_one_clean_line_and_is_counted() -> None:
    progress, _, stream = lines_of()
    progress.start_phase("pages", 1, None)
    progress.error("bad\x1b[2J [bold]page[/bold]\n\u202eat 7" + "x" * 1000)
    progress.partition_done(COUNTS, 0)
    progress.end_phase()
    line = stream.getvalue().splitlines()[1]
    assert line.startswith("error: bad [2J [bold]page[/bold] at 7xxx")
    assert len(line) < 320
    assert stream.getvalue().splitlines()[-1].endswith("1 error")


def test_leaving_by_an_exception_says_where_the_phase_stopped() -> None:
    progress, clock, stream = lines_of()

    def run() -> None:
        with progress:
            progress.start_phase("pages", 9, None)
            clock.now += 5
            raise KeyError

    with pytest.raises(KeyError):
        run()
    assert stream.getvalue().splitlines()[-1].startswith("pages: stopped after 5 s, 0/9 partitions")


def test_a_phase_that_reports_no_partitions_does_not_claim_to_have_done_none() -> None:
    progress, clock, stream = lines_of()
    progress.start_phase("tokens", 7, None)
    clock.now += 10
    progress.end_phase()
    assert stream.getvalue().splitlines()[-1] == "tokens: done in 10 s"
    progress.start_phase("tokens", 1, None)
    progress.partition_done({}, 0)
    progress.end_phase()
    assert stream.getvalue().splitlines()[-1] == "tokens: done in 0 s, 1/1 partition"


def test_terminal_shows_phase_funnel_estimate_and_last_errors() -> None:
    clock = Clock()
    progress, _, console = terminal(clock)
    progress.start_phase("pages", 10, 1000)
    for number in range(5):
        progress.error(f"file {number} [red]broke")
    for _ in range(2):
        clock.now += 30
        progress.partition_done(COUNTS, 100)
    shown = console.export_text()
    assert "2/10 partitions" in shown
    assert "20%" in shown
    assert "1 min 00 s gone, ETA 4 min 00 s" in shown
    assert "kept 30.0%   language −50.0%   quality −20.0%" in shown
    last = shown[shown.rindex("5 errors") :]
    assert "file 4 [red]broke" in last
    assert "file 1" not in last


def test_terminal_is_redrawn_at_most_at_the_refresh_rate() -> None:
    clock = Clock()
    progress, stream, _ = terminal(clock)
    progress.start_phase("pages", 10_000, None)
    before = stream.getvalue().count("partitions")
    for _ in range(10_000):
        clock.now += 0.001  # ten seconds of partitions: twenty redraws
        progress.partition_done({"pages": 1, "kept": 1}, 1)
    assert 15 <= stream.getvalue().count("partitions") - before <= 21


def test_terminal_keeps_one_line_of_a_finished_phase_and_gives_the_cursor_back() -> None:
    clock = Clock()
    progress, stream, _ = terminal(clock)
    progress.start_phase("pages", 1, None)
    clock.now += 3
    progress.partition_done(COUNTS, 1)
    progress.end_phase()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")
    assert stream.getvalue().rstrip().splitlines()[-1].endswith("quality −20.0%")


def test_stdout_stays_untouched(capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(background=False) as progress:
        progress.start_phase("pages", 1, None)
        progress.error("x")
        print("{}")
        progress.partition_done(COUNTS, 0)
        progress.end_phase()
    captured = capsys.readouterr()
    assert captured.out == "{}\n"
    assert "pages: done" in captured.err


def test_a_broken_view_is_reported_once_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("the pipe is gone")

    for force_terminal in (False, True):
        console = Console(file=Broken(), force_terminal=force_terminal)
        with RunProgress(console=console, interval_s=0.0, refresh_s=0.0, background=False) as progress:
            progress.start_phase("pages", 2, None)
            progress.partition_done(COUNTS, 0)
            progress.error("x")
            progress.partition_done(COUNTS, 0)
            progress.end_phase()
        assert capsys.readouterr().err.count("progress cannot be shown") == 1


def test_strange_counts_do_not_break_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    progress, _, stream = lines_of()
    progress.start_phase("pages", 2, None)
    progress.partition_done({"pages": "many", "by_stage": None}, 0)
    progress.partition_done(COUNTS, 0)
    progress.end_phase()
    assert "100 pages" in stream.getvalue()
    assert "progress cannot be shown" in capsys.readouterr().err


def test_the_clock_runs_between_partitions() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with RunProgress(console=console, refresh_s=0.01) as progress:
        progress.start_phase("pages", 1, None)
        before = len(stream.getvalue())
        until(lambda: len(stream.getvalue()) > before)
    assert sys.stderr is not console.file


@given(st.floats(0, 1e7))
def test_a_duration_reads_back_to_its_leading_units(seconds: float) -> None:
    units = {"s": 1, "min": 60, "h": 3600, "d": 86400}
    words = format_duration(seconds).split()
    value = sum(int(number) * units[unit] for number, unit in zip(words[::2], words[1::2], strict=True))
    assert abs(value - seconds) <= max(0.5, units[words[-1]])
    assert all(int(number) < limit for number, limit in zip(words[2::2], [60], strict=False))


def test_pages_of_unfinished_partitions_are_counted_as_they_go() -> None:
    in_work = [0]
    progress, clock, stream = lines_of(10.0)
    progress.start_phase("pages", 2, 100, lambda: in_work[0])
    clock.now += 11
    in_work[0] = 550
    progress.tick()
    assert "0/2 partitions (0%), 550 pages (50/s)" in stream.getvalue().splitlines()[-1]
    clock.now += 11
    progress.tick()
    assert len(stream.getvalue().splitlines()) == 2, "no line without something new"
    in_work[0] = 0
    progress.partition_done({"pages": 600, "kept": 300}, 50)
    assert "600 pages" in stream.getvalue().splitlines()[-1]
    progress.end_phase()
    assert "1/2 partitions, 600 pages" in stream.getvalue().splitlines()[-1]


def test_a_look_from_outside_takes_nothing_from_the_lines() -> None:
    """Whoever asks first counts what is in work; the next line must come all the same."""
    progress, clock, stream = lines_of()
    in_work = [0]
    progress.start_phase("pages", 2, None, lambda: in_work[0])
    in_work[0] = 7
    clock.now += 31
    said = progress.snapshot()["phase"]
    assert (said["pages"], said["done"], said["partitions"]) == (7, 0, 2)
    progress.tick()
    assert "7 pages" in stream.getvalue()
    progress.end_phase()
    assert progress.snapshot()["phase"] is None
    assert [phase["name"] for phase in progress.snapshot()["past"]] == ["pages"]


def test_a_partition_that_is_done_again_counts_once_its_damage_too() -> None:
    first = {"pages": 9, "kept": 4, "by_stage": {"extract": 5}, "damage": ["a", "b"], "damage_left_out": 3}
    then = {"pages": 7, "kept": 6, "by_stage": {"language": 1}, "damage": ["a"], "damage_left_out": 0}
    done_again, done_once = RunProgress(background=False), RunProgress(background=False)
    for progress in (done_again, done_once):
        progress.start_phase("pages", 1, 10)
        progress.partition_done(first if progress is done_again else then, 10)
    done_again.partition_put_right(then, first)
    told, expected = done_again.snapshot()["phase"], done_once.snapshot()["phase"]
    for name in ("pages", "kept", "quarantined", "damage", "done", "share"):
        assert told[name] == expected[name], name
    assert told["damage"] == 1
    assert done_again._phase is not None
    assert list(done_again._phase.funnel()) == ["kept 85.7%", "language −14.3%"]
    for progress in (done_again, done_once):
        progress.end_phase()
