"""``quern lineage verify``: proves that nothing of the purged documents is left."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from quern import storage
from quern.cli.output import JSON, columns, err_console, json_stdout, out_console, reports_errors, say
from quern.data_pipeline.execution.run_directory import is_complete
from quern.errors import InputError
from quern.words import counted

if TYPE_CHECKING:
    from quern.lineage.purge.proof.verify import Proof

__all__ = ["verify"]

#: Findings of a check that the terminal is shown; --json has more.
_SHOWN = 10
_WORDS = {"pass": "yes", "fail": "NO", "unknown": "unknown"}


@reports_errors
def verify(
    run: Annotated[str, typer.Argument(help="A data run, here or on a store.", metavar="RUN")],
    deep: Annotated[
        bool,
        typer.Option("--deep", help="Decode every document that is left, and compare its text with those purged."),
    ] = False,
    train_run: Annotated[
        list[str] | None,
        typer.Option(help="A training run whose forensics pages are looked at too; may be given again.", metavar="DIR"),
    ] = None,
    purge_list: Annotated[
        str | None, typer.Option(help="Where the purge list is, if it was moved since.", metavar="PATH")
    ] = None,
    audit_key: Annotated[
        str | None,
        typer.Option(help="A file of 32 bytes or more, kept elsewhere, with which the log is signed.", metavar="FILE"),
    ] = None,
    sign: Annotated[
        bool, typer.Option("--sign", help="Sign the audit log with --audit-key, if the proof holds.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Number of shards read in parallel; default: one per CPU.")
    ] = None,
    json: bool = JSON,
) -> None:
    """Check that nothing purged from RUN is left, by reading all of its tokens, texts and tables.

    An interrupted purge is finished or undone first. Exit code 1 when something remains; each finding names its file
    and row.
    """
    from quern.lineage.purge.apply.transaction import recover
    from quern.lineage.purge.proof.verify import verify as look
    from quern.lineage.purge.record import audit

    key = audit.read_key(audit_key) if audit_key is not None else None
    if sign and key is None:
        raise InputError("--sign: expected a key, with --audit-key FILE")
    with json_stdout(json) as emit:
        recovered = recover(run) if is_complete(run) and _is_writable(run) else None
        if recovered is not None:
            say(f"{run}: {recovered}", err_console())
        last = audit.last_entry(run) if sign else None
        if sign and last is None:
            raise InputError(f"{run}: has no entry in its audit log that could be signed")
        proof = look(
            run,
            deep=deep,
            train_runs=train_run or (),
            purge_list=purge_list,
            workers=workers or os.cpu_count() or 1,
            key=key,
            to_sign=sign,
        )
        if last is not None and key is not None and proof.holds:
            audit.sign(run, last, key)
            say(f"{run}: entry {last.number} of the audit log is signed", err_console())
        emit(proof.to_dict() | {"recovered": recovered})
        if not json:
            _print(proof)
    if not proof.holds:
        raise typer.Exit(1)


def _is_writable(run: str) -> bool:
    """Whether something can be recovered; what an unfinished purge left is a finding where it cannot."""
    return not storage.is_local(run) or os.access(storage.split(run)[1], os.W_OK)


def _print(proof: Proof) -> None:
    console = out_console()
    table = columns("", "holds", "claim", "looked at")
    for check in proof.checks:
        counts = ", ".join(f"{count:,} {name}" for name, count in check.counts.items())
        table.add_row(check.name, _WORDS[check.status], check.claim, counts or "nothing")
    console.print(table)
    for check in proof.checks:
        for found in check.findings[:_SHOWN]:
            where = found.file if found.row is None else f"{found.file}: row {found.row:,}"
            who = f" ({found.doc_id})" if found.doc_id else ""
            say(f"{check.name}: {where}: {found.what}{who}")
        if check.num_findings > _SHOWN:
            console.print(f"{check.name}: … and {check.num_findings - _SHOWN:,} more; --json has more of them")
    for check in proof.checks:
        for why in check.unknown:
            say(f"not known: {check.name}: {why}", err_console())
    left = sum(check.num_findings for check in proof.checks)
    what = f"{counted(proof.documents, 'document')} of {counted(proof.purges, 'purge')}; corpus version {proof.version}"
    notes = "".join(f"; {note}" for check in proof.checks for note in check.notes)
    if not proof.purges and not left:
        told = f"no purge is recorded; nothing is out of place; corpus version {proof.version}"
    else:
        unknown = any(check.unknown for check in proof.checks)
        none = f"nothing of them is {'found, but not everything could be looked at' if unknown else 'left'}"
        told = f"{what}: {counted(left, 'finding') if left else none}"
    say(f"{told}{notes}")
