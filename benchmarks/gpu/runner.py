"""Runs rows, each in a fresh process with a limit, and keeps what each gives as a file of its own. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = [
    "HERE",
    "ROOT",
    "Left",
    "Row",
    "ask",
    "environment",
    "key_of",
    "place_of",
    "results",
    "run",
    "source",
    "write",
]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Of the question what machine this is: an import of torch, and a CUDA context.
ASK_S = 120.0


@dataclass(frozen=True)
class Row:
    """What one process measures."""

    part: str
    name: str
    function: str
    """``module:function``, which is given ``spec`` and gives ``measures``, a list of flat mappings. One with ``passes``
    false fails the row."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    limit_s: float = 60.0
    skip: str | None = None
    """Why it is not begun on this machine."""


@dataclass(frozen=True)
class Left:
    """What a call leaves."""

    failed: list[dict[str, Any]]
    """Results of the rows asked for, of this call or one before."""
    waiting: list[Row]
    """Rows that were not begun, since their limit is beyond the time that was left."""


def source() -> str:
    """The commit; where there is none or files differ from it, a digest of the sources."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    commit = git("rev-parse", "HEAD")
    if (
        commit
        and git("rev-parse", "--show-toplevel") == str(ROOT)
        and git("status", "--porcelain", "--", *SOURCES) == ""
    ):
        return commit[:12]
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return f"files-{digest.hexdigest()[:12]}"


SOURCES = ("quern", "benchmarks")


def environment() -> dict[str, str]:
    """A row's: the checkout comes first, for the processes that it starts too; what one row has compiled serves the
    next."""
    before = os.environ.get("PYTHONPATH")
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "quern-gpu-compiled"))
    path = os.pathsep.join([str(ROOT), *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_CACHE_DIR": compiled}


def ask(device: str) -> dict[str, Any]:
    """What machine this is, asked in a process of its own, since a context takes memory as long as it is open.

    Raises RuntimeError with the reason where the device does not answer.
    """
    found = _measure(Row("machine", "machine", "parts.machine:describe", {"device": device}, ASK_S), None)
    if found["error"]:
        raise RuntimeError(found["error"])
    (machine,) = found["measures"]
    return dict(machine)


def key_of(machine: Mapping[str, Any], code: str, small: bool) -> str:
    """The folder of results that belong together: one state of the sources, device, torch."""
    return "_".join([slug(machine["device"]), f"torch-{slug(machine['torch'])}", code, *(["small"] if small else [])])


def place_of(row: Row, folder: Path) -> Path:
    return folder / row.part / f"{slug(row.name)}.json"


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.+]+", "-", text.lower()).strip("-")


def run(
    rows: Sequence[Row], folder: Path, about: Mapping[str, Any], *, seconds: float, again: bool = False,
    tell: Callable[[str], None] = print,
) -> Left:  # fmt: skip
    """Run the rows that have no result in ``folder``; ``again`` removes what they have first. A row is begun only if
    its limit ends within ``seconds``. ``about``: what every result says of its circumstances."""
    ends = time.monotonic() + seconds
    failed, waiting = [], []
    for row in rows if again else ():
        place_of(row, folder).unlink(missing_ok=True)
    for row in rows:
        place = place_of(row, folder)
        if place.exists():
            found = json.loads(place.read_text())
        elif row.skip is not None:
            found = {**_head(row), "error": None, "skipped": row.skip, "measures": [], **about}
            write(place, found)
        elif row.limit_s > ends - time.monotonic():
            waiting.append(row)
            continue
        else:
            found = {**_measure(row, place.with_suffix(".log")), **about}
            write(place, found)
            tell(f"{row.part} / {row.name}: {_outcome(found)}")
        if found["error"]:
            failed.append(found)
    return Left(failed, waiting)


def results(out: Path) -> list[dict[str, Any]]:
    """All that lie under ``out``."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*/*/*.json"))]


def write(path: Path, found: object) -> None:
    """As JSON, or text as it is; whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(found if isinstance(found, str) else json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    partial.rename(path)


def _head(row: Row) -> dict[str, Any]:
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return {"part": row.part, "row": row.name, "spec": dict(row.spec), "began": began}


def _measure(row: Row, log: Path | None) -> dict[str, Any]:
    """What the row gives, or ``error``; what it has printed goes to ``log``. All that it has started ends with it."""
    head, began = _head(row), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quern-gpu-") as folder:
        given, said = Path(folder, "result.json"), Path(folder, "said")
        command = [sys.executable, str(HERE / "row.py"), row.function, json.dumps(dict(row.spec)), str(given)]
        with said.open("wb") as file:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                env={**environment(), "TMPDIR": folder},
            )  # fmt: skip
            try:
                code: int | None = process.wait(timeout=row.limit_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        head["seconds"] = round(time.monotonic() - began, 3)
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(said, log)
        if code == 0 and given.exists():
            found = json.loads(given.read_text())
            return {**head, "error": _above(found["measures"]), "skipped": found.get("skipped"), **found}
        text = said.read_text(errors="replace")
    return {**head, "error": _reason(code, row.limit_s, text), "skipped": None, "measures": []}


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole session of a row, compilers and ranks too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _above(measures: Sequence[Mapping[str, Any]]) -> str | None:
    """The first measure that does not pass, in words."""
    wrong = [measure for measure in measures if measure.get("passes") is False]
    if not wrong:
        return None
    what = ", ".join(f"{name} {value}" for name, value in wrong[0].items() if name != "passes" and value is not None)
    return f"{len(wrong)} of {len(measures)} beyond the bound: {what}"


def _reason(code: int | None, limit_s: float, text: str) -> str:
    """In one line."""
    if code is None:
        return f"took longer than {limit_s:g} s"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if code and lines else f"ended with code {code} and no result"


def _outcome(found: Mapping[str, Any]) -> str:
    if found["error"]:
        return f"failed: {found['error']}"
    return f"skipped: {found['skipped']}" if found["skipped"] else f"{found['seconds']:.0f} s"
