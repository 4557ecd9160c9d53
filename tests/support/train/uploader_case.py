"""What tests of the process that copies checkpoint files share: files to copy, requests, and what it says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from quern.train.checkpoint.tiers.upload import Uploader
from support.train.tier_case import content, manifest, record
from support.waits import until


def saved(folder: Path, step: int, sizes: dict[str, int]) -> dict[str, bytes]:
    """Writes a checkpoint's files; the manifest is among them."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: content(size, step + place) for place, (name, size) in enumerate(sizes.items())}
    files["manifest.json"] = manifest(step, {name: record(data) for name, data in files.items()}).to_bytes()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def asked(number: int, step: int, folder: Path, files: dict[str, bytes]) -> dict[str, Any]:
    """What a mover is told to upload ``files``, without their manifest."""
    plain = {name: vars(record(data)) for name, data in files.items() if name != "manifest.json"}
    return {"number": number, "step": step, "folder": str(folder), "files": plain, "last": None}


def heard(uploader: Uploader, *kinds: type, count: int = 1, seen: list[Any] | None = None) -> list[Any]:
    """Events up to the ``count``-th of ``kinds``."""
    events: list[Any] = [] if seen is None else seen

    def listen() -> bool:
        if sum(isinstance(event, kinds) for event in events) < count:
            events.extend(uploader.poll())
            time.sleep(0.02)
        return sum(isinstance(event, kinds) for event in events) >= count

    until(listen)
    return events
