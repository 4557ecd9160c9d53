"""Findings of the proof, and what it has looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

__all__ = ["MAX_FINDINGS", "Check", "Finding"]

#: Of a check that are kept; all are counted.
MAX_FINDINGS = 100


@dataclass(frozen=True)
class Finding:
    """Something that should not exist, or is not as it should be."""

    file: str
    """Below the run, or where it stands."""
    what: str
    row: int | None = None
    """Of a table, from 0; of a shard, its span."""
    doc_id: str | None = None
    """Hex."""


@dataclass
class Check:
    """One claim about a run, and whether it holds."""

    name: str
    claim: str
    counts: Counter[str] = field(default_factory=Counter)
    """What was looked at."""
    findings: list[Finding] = field(default_factory=list)
    """The first :data:`MAX_FINDINGS` of ``num_findings``."""
    num_findings: int = 0
    unknown: list[str] = field(default_factory=list)
    """What could not be looked at, and why."""
    notes: list[str] = field(default_factory=list)
    """What is no finding, and that the verdict has to say: a clause each."""

    @property
    def status(self) -> Literal["pass", "fail", "unknown"]:
        """``unknown``: nothing was found, but not everything could be looked at."""
        return "fail" if self.num_findings else "unknown" if self.unknown else "pass"

    def found(self, file: str, what: str, row: int | None = None, doc_id: bytes | None = None) -> None:
        """Note a finding."""
        self.num_findings += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(file, what, row, None if doc_id is None else doc_id.hex()))

    def found_each(self, file: str, what: str, which: np.ndarray, doc_ids: np.ndarray, first: int | None = 0) -> None:
        """Note a finding for those of ``doc_ids`` (S16[n]) that the mask ``which`` selects. ``first``: the row of the
        first of ``doc_ids``; None: they are in no rows."""
        for at in np.flatnonzero(which).tolist():
            self.found(file, what, None if first is None else first + at, doc_ids[at : at + 1].tobytes())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "status": self.status, "findings": list(map(asdict, self.findings))}
