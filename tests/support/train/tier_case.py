"""What tests of checkpoints' tiers share: small manifests, and stand-ins for a mover's and a server's handles."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quern.train.checkpoint.format.manifest import EncodingInfo, FileRecord, Manifest
from quern.train.checkpoint.tiers.upload import Event, Failed, Uploaded
from support.train import checkpoint_case as case

SHA = "0123456789abcdef" * 4
PATIENCE_S = 30.0
SMALL = {".metadata", "config.yaml", "ledger.jsonl"}
TENSORS = {f"__{rank}_{n}.distcp" for rank in range(4) for n in range(2)}
MINE = {name for name in TENSORS if name[2] in "01"}


def content(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def record(data: bytes) -> FileRecord:
    return FileRecord(hashlib.sha256(data).hexdigest(), len(data))


def manifest(step: int, files: Mapping[str, FileRecord], **changes: Any) -> Manifest:
    """One of a small run that names ``files``."""
    fields: dict[str, Any] = {
        "step": step, "data_step": step, "tokens": 123, "model": case.shape(), "layout": {"dp_shard": 4},
        "precision": "bf16", "order": "ab" * 16, "ledger_offset": 1, "corpus_versions": {},
        "corpus_fingerprint": "f00", "encoding": EncodingInfo("gpt2", 127, 50, SHA), "config_digest": "cd",
        "optimizer": True, "scalars": {}, "written_by": {}, "files": files,
    }  # fmt: skip
    return Manifest(**(fields | changes))


def checkpoint(root: Path, step: int, tensors: Path | None = None) -> str:
    """A published checkpoint; its tensor files in the folder ``tensors``, or beside the manifest."""
    folder = root / "run" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    files = {}
    for name in SMALL | TENSORS:
        data = f"{step} {name}".encode()
        into = folder if tensors is None or name in SMALL else tensors / f"step_{step:08d}"
        into.mkdir(parents=True, exist_ok=True)
        (into / name).write_bytes(data)
        files[name] = record(data)
    (folder / "manifest.json").write_bytes(manifest(step, files).to_bytes())
    if tensors is not None:
        plain = '{"schema": 1, "nodes": [{"host": "h0", "folder": "%s", "files": [%s]}]}'
        (folder / "places.json").write_text(plain % (tensors, ", ".join(f'"{name}"' for name in sorted(TENSORS))))
    return str(folder)


def check(asked, step: int, folder: str, names: set[str], last: set[str] = frozenset()) -> None:
    """That one request is for these files with their own checksums."""
    found_step, found_folder, files, found_last = asked
    assert (found_step, found_folder) == (step, folder)
    assert set(files) == names
    assert set(found_last or {}) == last
    for name, found in {**files, **(found_last or {})}.items():
        data = Path(folder, name).read_bytes()
        assert found == record(data), name


class Mover:
    """In place of an uploader: remembers what it is asked, and says what the test tells it to."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, Mapping[str, FileRecord], Mapping[str, FileRecord] | None]] = []
        self.cancelled: list[int] = []
        self.unfinished: list[tuple[int, bool]] = []
        self.closed = 0
        self.on_upload: Callable[[], object] = lambda: None
        self.on_poll: Callable[[], object] = lambda: None
        self._events: list[Event] = []

    def upload(self, step, folder, files, last=None) -> None:
        self.on_upload()
        self.asked.append((step, folder, files, last))
        self.unfinished = [key for key in self.unfinished if key != (step, bool(last))] + [(step, bool(last))]

    def cancel(self, step) -> None:
        self.cancelled.append(step)
        self.unfinished = [key for key in self.unfinished if key[0] != step]

    def poll(self) -> list[Event]:
        self.on_poll()
        events, self._events = self._events, []
        for event in events:
            if isinstance(event, Uploaded) or (isinstance(event, Failed) and event.dropped):
                self.unfinished = [key for key in self.unfinished if key != (event.step, event.last)]
        return events

    def close(self) -> None:
        self.closed += 1

    def say(self, *events: Event) -> None:
        self._events = [*self._events, *events]

    def done(self, step: int, last: bool = False) -> None:
        self.say(Uploaded(step, last, 10, 0.1))


class Server:
    def __init__(self, port: int) -> None:
        self.port, self.dead, self.closed = port, False, 0

    def alive(self) -> bool:
        return not self.dead

    def close(self) -> None:
        self.closed += 1
