"""Proves from a run's files alone, by full scans, that nothing of what was purged is left.

What was purged is read from the audit log; everything else is looked at as it stands, however it came to be so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quern import storage
from quern.errors import InputError
from quern.lineage.purge.proof.check_audit import check_audit, check_files
from quern.lineage.purge.proof.check_rest import check_left_over, check_pages, check_purge_list
from quern.lineage.purge.proof.check_strangers import check_strangers
from quern.lineage.purge.proof.check_tables import check_documents, check_signatures, find_relatives
from quern.lineage.purge.proof.check_tokens import check_tokens
from quern.lineage.purge.proof.findings import Check
from quern.tokenize.shard_format import VERSION_FILE
from quern.train.history.consumers import read_consumers

__all__ = ["Proof", "verify"]


@dataclass(frozen=True)
class Proof:
    """All checks of a run, in the order in which they were made."""

    run: str
    version: int
    """Of the corpus; 0 where there are no tokens."""
    purges: int
    documents: int
    """Purged, all purges together."""
    deep: bool
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether no check has found anything."""
        return not any(check.num_findings for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "holds": self.holds, "checks": [check.to_dict() for check in self.checks]}


def verify(
    run: str,
    *,
    deep: bool = False,
    train_runs: Sequence[str] = (),
    purge_list: str | None = None,
    workers: int = 4,
    key: bytes | None = None,
    to_sign: bool = False,
) -> Proof:
    """Check everything in ``run`` (local or on a store) that a purge should have changed.

    Args:
        run: the data run. What a purge left unfinished is recovered by the caller, before.
        deep: decode every span and hash every text that is left, and compare them with the texts that were purged.
        train_runs: training runs whose forensics pages are looked at, beside those that the run and its audit log name.
        purge_list: where the purge list is, if it is not where the purge left it.
        workers: shards that are read at once.
        key: with which the audit log has to be signed, but for its last entry if that is ``to_sign``.

    Raises:
        InputError: there is no data run.
    """
    if not storage.is_file(storage.join(run, "run.json")):
        raise InputError(f"{run}: expected a data run: it has no run.json")
    path = storage.join(run, "tokens", VERSION_FILE)
    version = storage.read_json(path) if storage.is_file(path) else None
    if version is not None and not (isinstance(version, dict) and isinstance(version.get("sources"), dict)):
        raise InputError(f"{path}: sources: expected a mapping")
    purged, audited = check_audit(run, version, key, to_sign=to_sign)
    relatives, verdicts = find_relatives(run, purged)
    tokens, sums = check_tokens(run, version, purged, relatives, deep=deep, workers=workers)
    checks = (
        audited,
        tokens,
        sums,
        check_documents(run, purged, relatives, deep=deep),
        check_signatures(run, purged),
        verdicts,
        check_files(run, purged),
        check_left_over(run, version),
        check_strangers(run, version, purged, deep=deep),
        check_purge_list(purged, purge_list),
        check_pages(run, purged, _train_runs(run, train_runs, purged.entries)),
    )
    number = version.get("version") if version is not None else 0
    return Proof(run, number if isinstance(number, int) else 0, len(purged.entries), len(purged.ids), deep, checks)


def _train_runs(run: str, given: Sequence[str], entries: Sequence[dict[str, Any]]) -> list[str]:
    told = [own for entry in entries for own in entry.get("train_runs") or () if isinstance(own, str)]
    registered = [own.train_run for own in read_consumers(storage.split(run)[1])] if storage.is_local(run) else []
    return list(dict.fromkeys([*given, *told, *registered]))
