"""Finds sources, input files and languages that lose nearly all documents at one gate, and sources without records.

Sources and files are counted from the commits of their partitions, languages and the duplicates of a file from the
verdicts that the survey of the report has read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quern.data_pipeline.report.stats import FileCounts
from quern.data_pipeline.report.survey import Survey
from quern.data_pipeline.sources import SourceConfig
from quern.errors import QuernError

__all__ = ["MIN_DOCUMENTS", "NEARLY_ALL", "check_sources", "find_losses"]

#: Documents that must have come to a gate before it is said to take nearly all of them.
MIN_DOCUMENTS = 20
#: Share of the documents that came to a gate and were dropped there, from which on that is an alarm.
NEARLY_ALL = 0.98
MAX_ALARMS = 1000

#: Pages in a language that ``language.keep`` leaves out: dropped as the config says, before and after extraction.
_UNWANTED = ("language:language.pre_skip", "language:language.not_wanted")
_GATES = ("read", "quarantine", "purged", "url", "unwanted", "extract", "language", "quality", "pii", "toxicity",
          "duplicates")  # fmt: skip

_FIELD = "no text in the field {field!r}; set sources.{at}.text_field to the field that holds the text"
_KIND = "check sources.{at}.kind and sources.{at}.paths"
#: Reason → what it says of the records, and what to do.
_READ = {
    "read.no_field": _FIELD,
    "read.null_text": _FIELD,
    "read.wrong_type": _FIELD,
    "read.too_large": "larger than max_bytes; raise sources.{at}.max_bytes",
}


@dataclass(frozen=True)
class _Loss:
    """What one gate took of a source, a file or a language."""

    gate: str
    entered: int
    lost: int
    reason: str
    """The most frequent one."""
    num_reason: int

    @property
    def is_alarm(self) -> bool:
        """Whether the gate takes nearly all, and not because the config asks for it."""
        wanted = self.gate not in ("purged", "unwanted")
        return wanted and self.entered >= MIN_DOCUMENTS and self.lost >= NEARLY_ALL * self.entered


def find_losses(
    stats: Mapping[str, Any], files: Mapping[tuple[str, str], FileCounts], found: Survey
) -> list[dict[str, Any]]:
    """The alarms of a run as plain data, sources first: ``what`` (source, file, language, host), ``name``, ``source``
    of a file, ``gate``, documents that ``entered`` it (None: not counted) and were ``lost`` there, the most frequent
    ``reason``, and ``text``, a sentence for a person. Those of the search for duplicates, which ``stats`` has, are
    among them.

    A language or a file that ``language.keep`` leaves out is no alarm, nor is what was purged. A file is not named
    where its source is, for the same gate. Duplicates of a whole source are told by the search for them.

    Args:
        stats: of :func:`quern.data_pipeline.report.build_stats`.
        files: as it fills them.
        found: the survey of the same run.
    """
    alarms = []
    told: set[tuple[str, str]] = set()
    for name, table in stats["sources"].items():
        for loss in _source_losses(table):
            told.add((name, loss.gate))
            alarms.append(_alarm("source", name, loss, _source_text(name, loss, table, stats)))
    alarms += [alarm for alarm in stats["alarms"] if alarm["what"] == "source"]
    more = [alarm for alarm in stats["alarms"] if alarm["what"] != "source"]
    for (source, path), file in files.items():
        if not file.pages and file.damage is not None and (source, "read") not in told:
            text = f"file {path} of source {source}: no record could be read: {file.damage}"
            more.append(_alarm("file", path, _Loss("read", 0, 0, "damage", 0), text, source=source))
        by_reason = Counter(file.by_reason)
        if all((source, name) in found.duplicates for name in file.partitions):
            by_reason["duplicates:removed"] = sum(found.duplicates[source, name] for name in file.partitions)
        for loss in _walk(file.pages, by_reason):
            if loss.is_alarm and (source, loss.gate) not in told:
                text = _text(f"file {path} of source {source}", loss)
                more.append(_alarm("file", path, loss, text, source=source))
    for language, by_reason in found.losses.items():
        for loss in _walk(sum(found.languages[language]), by_reason):
            if loss.is_alarm and not all((source, loss.gate) in told for source in stats["sources"]):
                seen = "" if found.complete else f", of the {found.rows_read:,} pages that the report has looked at"
                more.append(_alarm("language", language, loss, _text(f"language {language}", loss) + seen))
    more.sort(key=lambda alarm: (-alarm["lost"], alarm["what"], alarm["name"], alarm.get("source", "")))
    return (alarms + more)[:MAX_ALARMS]


def check_sources(stats: Mapping[str, Any], sources: Sequence[SourceConfig]) -> None:
    """Refuse a finished run with a source that gave no record and may not be empty; all else of it stands.

    Raises:
        QuernError: names the source, the most frequent cause, and what to do.
    """
    empty = [
        (at, source)
        for at, source in enumerate(sources)
        if not source.allow_empty and source.name in stats["sources"] and _is_lost(stats["sources"][source.name])
    ]
    if not empty:
        return
    at, source = empty[0]
    table = stats["sources"][source.name]
    if table["pages"]:
        loss = next(loss for loss in _walk(table["pages"], table["by_reason"]) if loss.gate == "read")
        why = _READ.get(loss.reason, _KIND).format(at=at, field=source.text_field)
        none = f"none of its {table['pages']:,} records could be read, {loss.num_reason:,}"
        cause = f"{none if table['pages'] > 1 else 'its only record could not be read,'} as {loss.reason}: {why}"
    else:
        cause = f"{_no_record(source.name, table, stats)}; {_KIND.format(at=at)}"
    others = f" (and {len(empty) - 1} more: {', '.join(other.name for _, other in empty[1:6])})" if empty[1:] else ""
    raise QuernError(f"source {source.name}: {cause}, or set sources.{at}.allow_empty=true{others}")


def _is_lost(table: Mapping[str, Any]) -> bool:
    return bool(table["pages"] == table["by_stage"].get("read", 0))


def _walk(pages: int, by_reason: Mapping[str, int]) -> Iterator[_Loss]:
    """What each gate took, in the order of the chain. Pages in unwanted languages count as gone before extraction."""
    reasons: dict[str, Counter[str]] = {gate: Counter() for gate in _GATES}
    for full, count in sorted(by_reason.items()):
        stage, _, reason = full.partition(":")
        reasons.setdefault("unwanted" if full in _UNWANTED else stage, Counter())[reason] += count
    duplicates = reasons.pop("duplicates")
    for gate, counts in (*reasons.items(), ("duplicates", duplicates)):
        if lost := counts.total():
            yield _Loss(gate, pages, lost, *counts.most_common(1)[0])
        pages -= lost


def _source_losses(table: Mapping[str, Any]) -> list[_Loss]:
    """Of a source: also where it gave no record, and the gate that took most where all together left nothing."""
    losses = [loss for loss in _walk(table["pages"], table["by_reason"]) if loss.gate != "purged"]
    if _is_lost(table):
        return losses or [_Loss("read", 0, 0, "no record", 0)]
    alarms = [loss for loss in losses if loss.is_alarm]
    wanted = sum(loss.lost for loss in losses)
    if not alarms and not table["kept"] and wanted >= MIN_DOCUMENTS:
        alarms = [max(losses, key=lambda loss: loss.lost)]
    return alarms


def _alarm(what: str, name: str, loss: _Loss, text: str, **more: str) -> dict[str, Any]:
    return {"what": what, "name": name, **more, "gate": loss.gate, "entered": loss.entered, "lost": loss.lost,
            "reason": loss.reason, "text": text}  # fmt: skip


def _source_text(name: str, loss: _Loss, table: Mapping[str, Any], stats: Mapping[str, Any]) -> str:
    if not table["pages"]:
        return f"source {name}: {_no_record(name, table, stats)}"
    text = _text(f"source {name}", loss)
    return text if table["kept"] else f"{text}; no document of it is kept"


def _text(who: str, loss: _Loss) -> str:
    if loss.gate == "duplicates":
        return f"{who} loses {loss.lost:,} of {loss.entered:,} documents as duplicates"
    where = "because language.keep leaves their languages out" if loss.gate == "unwanted" else f"at {loss.gate}"
    share = f", all as {loss.reason}" if loss.num_reason == loss.lost else f", {loss.num_reason:,} as {loss.reason}"
    return f"{who} loses {loss.lost:,} of {loss.entered:,} documents {where}{share}"


def _no_record(name: str, table: Mapping[str, Any], stats: Mapping[str, Any]) -> str:
    damage = next((item["why"] for item in stats["damage"]["first"] if item["source"] == name), None)
    if damage is not None:
        return f"no record could be read: {damage}"
    if table["other_records"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in table["other_records"].items())
        return f"no record of its files is a page ({kinds})"
    return "its files hold no record"
