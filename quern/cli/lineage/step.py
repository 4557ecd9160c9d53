"""``quern lineage step``: the documents of one training step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quern.cli.lineage.exposure import positions
from quern.cli.open_run import open_training
from quern.cli.output import JSON, err_console, json_stdout, plain, plain_line, reports_errors
from quern.words import counted

if TYPE_CHECKING:
    from quern.lineage.steps import StepRead
    from quern.lineage.training import TrainingRun

__all__ = ["step"]

Row = dict[str, Any]


@reports_errors
def step(
    train_run: Annotated[str, typer.Argument(help="A training run.", metavar="TRAIN_RUN")],
    number: Annotated[int, typer.Argument(min=0, help="The model step; the first is 0.", metavar="STEP")],
    rank: Annotated[int | None, typer.Option(min=0, help="Only what this data-parallel rank computed.")] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            min=0, help="What this start of the trainer read at the step; 0 is the first, as in metrics.jsonl."
        ),
    ] = None,
    json: bool = JSON,
) -> None:
    """The documents of the batch that TRAIN_RUN read at STEP, sequence by sequence: where each stands in the global
    batch, who computed it, and which positions of it are input and target of which document. By default of the branch
    that the weights are on."""
    from quern.lineage.steps import losses_of, read_step

    with json_stdout(json) as emit:
        run = open_training(train_run)
        read = read_step(run, number, attempt)
        losses = losses_of(run, read)
        read = read if rank is None else read.of_rank(rank)
        sequences = _sequences(read, losses)
        if json:
            emit(_about(read, run) | {"sequences": list(sequences)})
        else:
            _print(read, run, sequences)
        for reason in read.unknown.values():
            err_console().print(plain(reason), markup=False, soft_wrap=True)


def _about(read: StepRead, run: TrainingRun) -> Row:
    attempt = read.attempt
    return {
        "train_run": run.path, "trained_in": run.folder_of(attempt),
        "step": read.step, "data_step": read.data_step, "attempt": attempt.number,
        "kind": attempt.kind, "state": _state(read), "applied": read.applied, "order": attempt.order,
        "seq_len": read.seq_len, "document_mask": attempt.document_mask, "dp": attempt.dp,
        "micro_batch_size": attempt.micro_batch, "global_batch": read.global_batch,
        "unknown_sources": {read.identities[source]: why for source, why in read.unknown.items()},
    }  # fmt: skip


def _state(read: StepRead) -> str:
    if not read.proven:
        return "unproven"
    return "surviving" if read.surviving else "abandoned"


def _sequences(read: StepRead, losses: Mapping[int, float | None]) -> Iterator[Row]:
    """A row a sequence, its documents in it."""
    import numpy as np

    parts = read.documents
    doc_ids: list[bytes] = [b""] * len(parts.numbers)
    urls: list[str | None] = [None] * len(parts.numbers)
    names = list(urls)
    for source, (lineage, _) in read.streams.items():
        where = np.flatnonzero(parts.sources == source)
        unique, which = np.unique(parts.numbers[where], return_inverse=True)
        documents = lineage.documents(unique)
        called = lineage.names(documents)
        for row, index in zip(where.tolist(), which.tolist(), strict=True):
            doc_ids[row], urls[row], names[row] = documents.doc_ids[index], documents.urls[index], called[index]
    columns = {name: column.tolist() for name, column in vars(parts).items()}
    places = read.places_G.tolist()
    edges = np.searchsorted(parts.sequences, read.places_G), np.searchsorted(parts.sequences, read.places_G, "right")
    dealt = [(read.ranks_G, "rank"), (read.micro_batches_G, "micro_batch"), (read.rows_G, "row")]
    for index, (place, first, stop) in enumerate(zip(places, *(edge.tolist() for edge in edges), strict=True)):
        source = int(read.sources_G[index])
        known = read.streams.get(source)
        yield {
            "place": place,
            **{name: None if column is None else int(column[index]) for column, name in dealt},
            "source": read.identities[source], "epoch": int(read.epochs_G[index]),
            "window": int(read.windows_G[index]), "loss": losses.get(place),
            "data_run": known[0].run if known else None,
            "documents": [
                {
                    "url": urls[row], "name": names[row], "doc_id": doc_ids[row].hex(),
                    "purged": columns["purged"][row],
                    "span": {"stream": known[1].name if known else None, "start": columns["starts"][row],
                             "length": columns["lengths"][row]},
                    "inputs": positions(columns, "input", row), "targets": positions(columns, "target", row),
                }
                for row in range(first, stop)
            ],
        }  # fmt: skip


def _print(read: StepRead, run: TrainingRun, sequences: Iterator[Row]) -> None:
    attempt = read.attempt
    state = _state(read).replace("unproven", "nobody knows whether it got that far")
    skipped = "" if read.applied else ", its update skipped"
    print(f"{plain(run.path)}: step {read.step}, attempt {attempt.number} ({attempt.kind}, {state}{skipped})")
    if (trunk := run.folder_of(attempt)) != run.path:
        print(f"trained in {plain(trunk)}, from which this run was forked later")
    print(
        f"data step {read.data_step}, {counted(read.global_batch, 'sequence')} "
        f"of {read.seq_len:,} tokens; positions count from 0"
    )
    names = run.source_names(attempt)
    for row in sequences:
        who = "" if row["rank"] is None else f"  rank {row['rank']}, micro-batch {row['micro_batch']}"
        loss = "" if row["loss"] is None else f"  loss {row['loss']:.4f}"
        source = plain(names[row["source"]])
        print(f"\nsequence {row['place']}{who}  {source}, epoch {row['epoch']}, window {row['window']}{loss}")
        if row["data_run"] is None:
            print("  documents not known")
        for document in row["documents"]:
            note = "  (purged)" if document["purged"] else ""
            text = plain_line(document["name"]) if document["name"] is not None else "no url"
            print(f"  {_positions(document)}  {document['doc_id']}  {text}{note}")
    sys.stdout.flush()


def _positions(document: Row) -> str:
    """The positions at which a document is input, or else target."""
    found = document["inputs"]
    if found is None:
        start, stop = document["targets"]
        return f"{f'→ {start}–{stop - 1}':>14}"
    return f"{f'{found[0]}–{found[1] - 1}':>14}"
