"""When checkpoints are saved, where they are kept, and which one a run resumes from."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from quern.config import Section
from quern.train.config.numbers import Count, NonNegative

__all__ = ["CheckpointConfig", "ResumeConfig"]


class CheckpointConfig(Section):
    """When checkpoints are saved and which are kept."""

    interval: NonNegative | Literal["auto"] = 1000
    """[steps] Steps between saves; the last step is always saved; 0 = only the last; auto = the interval that loses
    least time, from the measured cost of saves and the failure rate of the run."""
    mtbf_hours: Annotated[float, Field(gt=0)] | None = None
    """[hours] Mean time between failures of the whole run, for auto; null = from the ledger's failures and Llama 3's
    rate. Example: 24"""
    max_interval_s: Annotated[float, Field(gt=0)] = 3600.0
    """[seconds] The longest interval that auto chooses."""
    keep_last: Count = 3
    """[checkpoints] Newest checkpoints that are kept, of the current branch; more are kept where they are needed."""
    keep_every: Count | None = None
    """[steps] Checkpoints whose step is a multiple are kept for ever; null = none. Example: 10000"""
    verify: bool = True
    """Compare every file's SHA-256 before a resume."""
    mode: Literal["sync", "thread", "process"] = "thread"
    """Who writes: the training loop itself, while it waits; a thread of each rank; a process beside each rank. The last
    two write from a copy in memory, as large as what a rank saves."""
    overlap: bool = True
    """Copy during the next forward and backward pass instead of before them; not with sync."""
    max_failures: Count = 3
    """[saves] The run fails when so many saves in a row have failed, or its last one."""
    local: str | None = None
    """A folder on each node's own disk for the tensor files, absolute; ``{node}`` is the node's number. Null = they are
    in run_dir, which all nodes share. The small files always are. Example: /local/checkpoints/{node}"""
    partner: bool | None = None
    """Mirror a node's files to the disk of the next node; null = where there is ``local``. Example: true"""
    store: str | None = None
    """Where checkpoints are uploaded during training; any URL that fsspec knows. A store belongs to one run. Example:
    s3://bucket/run"""
    store_every: Count | None = None
    """[steps] Upload checkpoints whose step is a multiple, and the last, and keep each until it is uploaded; null =
    each that appears when no other upload is in progress, and the last. Example: 5000"""
    store_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    """[bytes per second] Upload rate limit of each node; null = none. Example: 2e8"""
    upload_wait_s: Annotated[float, Field(ge=0)] = 600.0
    """[seconds] How long a run that ends waits for its uploads, at most 10 s after a signal; the next start resumes the
    upload of the checkpoint it resumes from."""

    @field_validator("interval", mode="before")
    @classmethod
    def _interval(cls, value: Any) -> Any:
        if value == "auto" or (type(value) is int and value >= 0):
            return value
        raise ValueError(f"expected an integer ≥ 0 or auto, got {value!r}")

    @field_validator("store")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError(f"expected a URL, as s3://bucket/run or file:///folder, got {value!r}")
        return value

    @field_validator("local")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not os.path.isabs(value):
            raise ValueError(f"expected an absolute path on each node's own disk, got {value!r}")
        if value is not None and set(re.findall(r"{[^}]*}?|}", value)) - {"{node}"}:
            raise ValueError(f"expected {{node}} and no other braces, got {value!r}")
        return value

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.local is not None and self.keep_last < 2:
            raise ValueError("keep_last: expected at least 2 with local: the newest may not be mirrored yet")
        if self.partner and self.local is None:
            raise ValueError("partner: expected with local only; without it all nodes share the files")
        for name in ("store_every", "store_bytes_per_s"):
            if self.store is None and getattr(self, name) is not None:
                raise ValueError(f"{name}: expected with store only")
        return self


class ResumeConfig(Section):
    """The checkpoint to resume from."""

    step: NonNegative | Literal["good"] | None = None
    """[steps] Null = the newest valid checkpoint. A number rolls back to that checkpoint and says so in the ledger;
    good does the same with the last good checkpoint (``guard.health_window``). Example: 4000"""
    again: Count | None = None
    """With a number in ``step``: the same request is carried out once, and a later start with it resumes after it;
    another number here makes it a new request, as after a purge of the corpus. Example: 2"""
    from_store: bool = False
    """A run_dir without a checkpoint resumes from those in checkpoint.store, instead of refusing to mix with them."""

    @field_validator("step", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value is None or value == "good" or (type(value) is int and value >= 0):
            return value
        raise ValueError(f"expected an integer ≥ 0, good or null, got {value!r}")
