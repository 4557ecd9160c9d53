"""``quern checkpoint diff``, ``reshard``, ``upcycle`` and ``prune``: compare finished checkpoints, rewrite them, make
sparse ones of dense ones, remove old ones."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.table import Table

from quern.cli.output import JSON, columns, err_console, json_stdout, out_console, plain, reports_errors, say
from quern.config import dump_yaml, load_config, parse_overrides, validate
from quern.errors import InputError, QuernError
from quern.model.moe.config import MoEConfig
from quern.remote.retry import StoreError
from quern.train.checkpoint.format.folder import FolderLock, remove_folder
from quern.train.checkpoint.format.manifest import CONFIG_FILE, Manifest, checkpoints_folder, read_manifest
from quern.train.checkpoint.retention.retention import Candidate, kept_in_store, survey
from quern.train.checkpoint.store.owner import check_owner_folder
from quern.train.checkpoint.store.store import prune_store
from quern.train.checkpoint.store.stored import check_owner, store_of
from quern.train.config import GuardConfig, TrainConfig
from quern.train.history.branch import find_checkpoint
from quern.train.init_from import model_section
from quern.words import counted, size

if TYPE_CHECKING:  # torch is imported by the commands that need it: it takes seconds
    from quern.train.checkpoint.tools.compare import Comparison, Fact, TensorDifference

__all__ = ["diff", "prune", "reshard", "upcycle"]


def _side(name: str) -> Any:
    return typer.Argument(help="A checkpoint, or a training run: its newest checkpoint.", metavar=name)


@reports_errors
def diff(
    a: Annotated[str, _side("A")],
    b: Annotated[str, _side("B")],
    moments: Annotated[
        bool | None,
        typer.Option(
            "--moments/--no-moments", help="Compare AdamW's moments too; without either, unless one alone has any."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Rows of the table; --json has all.")] = 20,
    json: bool = JSON,
) -> None:
    """Print the differences of two checkpoints. Exit code 0: equal bit for bit; 1: they differ; 2: cannot be compared.

    AdamW's moments are compared unless --no-moments is given or one side alone has any, which is said. Part of the
    state are the tensors, step, data step, tokens, order, model, corpus, encoding and scalars; where one side alone has
    an optimizer's state (the other was imported, say), weights, model and encoding, unless --moments is given. Layout,
    precision, software, ledger and config are listed, and decide nothing. Differences of a tensor are relative to the
    largest value of B's. Checksums are not compared (verify does). Memory: some 200 MB, for any model.
    """
    from quern.train.checkpoint.tools.compare import compare

    try:
        found = compare(find_checkpoint(a), find_checkpoint(b), moments=moments)
    except QuernError as error:
        raise InputError(str(error)) from None  # exit code 1 means that they differ
    with json_stdout(json) as emit:
        emit(found.to_dict())
        if not json:
            _print_comparison(found, top)
    if not found.equal:
        raise typer.Exit(1)


def _print_comparison(found: Comparison, top: int) -> None:
    out = out_console()
    if not sys.stdout.isatty():
        out.width = 200  # names stay in one piece for whoever reads the lines
    for title, facts in (("manifest", found.facts), ("config", found.config)):
        if facts:
            out.print(_facts_table(title, facts))
            out.print()
    different = [tensor for tensor in found.tensors if not tensor.equal]
    if different and top:
        out.print(_tensor_table(different[:top]))
        if len(different) > top:
            say(f"… and {len(different) - top} more (--top, --json)")
        out.print()
    count, of = found.equal_tensors, len(found.tensors)
    if found.optimizer_in is not None:
        which = f"all {of}" if count == of else f"{count} of {of}"
        say(f"{which} weights bitwise equal; optimizer state only in {found.optimizer_in}")
    else:
        what = "" if found.moments else "; moments not compared"
        say(f"{count} of {of} tensors bitwise equal{what}")
    say("equal" if found.equal else "different")


def _facts_table(title: str, facts: tuple[Fact, ...]) -> Table:
    table = columns(title, "a", "b")
    for fact in facts:
        values = [_cell(fact.values[side]) if side in fact.values else "—" for side in ("a", "b")]
        table.add_row(_cell(fact.name), *values)
    return table


def _tensor_table(tensors: list[TensorDifference]) -> Table:
    counts = (">differing", ">NaN in a alone", ">in b alone")
    table = columns("tensor", "size and type", ">max |a−b|", ">relative", *counts)
    for tensor in tensors:
        held = {side: f"{list(size)} {tensor.dtypes[side]}" for side, size in tensor.sizes.items()}
        if len(held) == 1:
            ((side, what),) = held.items()
            table.add_row(_cell(tensor.name), _cell(f"only in {side}: {what}"))
            continue
        what = held["a"] if held["a"] == held["b"] else f"{held['a']} / {held['b']}"
        row = [_cell(tensor.name), _cell(what)]
        if tensor.differing is not None:
            row += [f"{tensor.max_abs:.3g}", f"{tensor.relative:.3g}", f"{tensor.differing:,}"]
            row += [f"{count:,}" if count else "" for count in (tensor.nans["a"], tensor.nans["b"])]
        table.add_row(*row)
    return table


def _cell(value: Any) -> str:
    """Foreign text inside a table, whose cells know markup."""
    return plain(str(value)).replace("[", r"\[")


@reports_errors
def reshard(
    source: Annotated[str, _side("IN")],
    out: Annotated[str, typer.Argument(help="The new checkpoint; it must not exist.", metavar="OUT")],
    files: Annotated[int | None, typer.Option(min=1, help="Number of tensor files; default: one.")] = None,
    file_size: Annotated[
        str | None, typer.Option(help="Largest file of tensors instead: 1GiB, 500MB, bytes.", metavar="SIZE")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave out moments and what else only a trainer needs.")
    ] = False,
    json: bool = JSON,
) -> None:
    """Write a checkpoint again, bit for bit, in other files: one file to copy easily, or many to copy in parallel.
    Checksums are compared first. Any layout loads the result as it loads IN. Memory: one piece of a tensor, of at most
    256 MiB."""
    from quern.train.checkpoint.tools import rewrite

    limit = None if file_size is None else _bytes(file_size)
    if files is not None and limit is not None:
        raise InputError("--files and --file-size: expected one of them")
    with json_stdout(json) as emit:
        made = rewrite.reshard(find_checkpoint(source), out, files=files, file_size=limit, weights_only=weights_only)
        emit(made.to_dict())
        if not json:
            what = f"{counted(made.tensors, 'tensor')} of step {made.step}{'' if made.optimizer else ', weights only'}"
            sizes = sorted(made.files.values())
            print(f"{plain(made.source)} → {plain(made.folder)}: {what}")
            print(f"files      {len(sizes)}, of {size(sizes[0])} to {size(sizes[-1])}")


@reports_errors
def upcycle(
    source: Annotated[str, _side("IN")],
    out: Annotated[str, typer.Argument(help="The new checkpoint; it must not exist.", metavar="OUT")],
    moe: Annotated[
        list[str], typer.Argument(help="Keys of model.moe: num_experts=8 top_k=2 normalize=true", metavar="KEY=VALUE")
    ],
    seed: Annotated[int, typer.Option(min=0, help="Of the routers: as a fresh run of this seed has them.")] = 0,
    files: Annotated[int | None, typer.Option(min=1, help="Number of tensor files; default: one.")] = None,
    json: bool = JSON,
) -> None:
    """Write a dense model's weights as those of a model with experts, each a copy of its layer's SwiGLU (sparse
    upcycling). Before its first step the model equals the dense one, or the command refuses. Moments are left out; a
    run begins with it by init_from. Memory: one piece of a tensor, of at most 256 MiB, and what it is made of."""
    from quern.train.checkpoint.tools import upcycle as upcycling

    with json_stdout(json) as emit:
        given = validate(dict(parse_overrides(moe)), MoEConfig, "moe")
        made, shape = upcycling.upcycle(find_checkpoint(source), out, given, seed=seed, files=files)
        config = {"model": model_section(shape)}
        emit({**made.to_dict(), "model": shape.model_dump(mode="json"),
              "training_config": {"init_from": made.folder, **config}})  # fmt: skip
        if not json:
            print(f"{plain(made.source)} → {plain(made.folder)}: {shape.num_parameters:,} parameters, "
                  f"{shape.num_active_parameters:,} for a token, of step {made.step}, weights only")  # fmt: skip
            print(f"# init_from={plain(out)} takes this model by itself; in a training config it is written as")
            print(dump_yaml(config), end="")


def _bytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except (ValidationError, OverflowError):
        raise InputError(f"--file-size: expected a size such as 1GiB, 500MB or 1000000, got {text!r}") from None


@reports_errors
def prune(
    run: Annotated[str, typer.Argument(help="A training run that no trainer has open.", metavar="TRAIN_RUN")],
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="How many of the newest stay; without, as the run's config says.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=0, help="Steps whose multiples stay, 0 = none; without, as the run's config says."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be removed, and remove nothing; a trainer may be running."),
    ] = False,
    store: Annotated[
        bool, typer.Option("--store", help="Also in the run's checkpoint.store, by the same rule.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: bool = JSON,
) -> None:
    """Remove a run's old checkpoints, as its trainer does after a save. The newest that is whole stays in any case, and
    the one that has proved good; those of a branch the run has left do not count among the newest. In the store stay
    those that stay in the run, what is newer, and the store's newest."""
    root = checkpoints_folder(run)
    if not os.path.isdir(root):
        raise InputError(f"{root}: no such folder; expected a training run that has checkpoints")
    last, every, window = _policy(run, keep_last, keep_every)
    with closing(FolderLock(root)) if not dry_run else nullcontext(), json_stdout(json) as emit:
        found = survey(run, last, every, window)
        going = [candidate for candidate in found if not candidate.keep]
        stored = _StoredPruning(run, found, every) if store else None
        if not json:
            _print_candidates(found)
            if stored is not None:
                stored.print()
        if not dry_run:
            _confirm(len(going), len(stored.going) if stored else 0, yes, json)
        removed, problems = _remove([] if dry_run else going)
        if stored is not None and not dry_run:
            problems += stored.remove()
        emit({
            "run": run, "keep_last": last, "keep_every": every, "dry_run": dry_run, "problems": problems,
            "checkpoints": [candidate.to_dict() for candidate in found],
            "removable_bytes": sum(candidate.size for candidate in going),
            "removed": [candidate.checkpoint.path for candidate in removed],
            "removed_bytes": sum(candidate.size for candidate in removed),
        } | ({"store": stored.to_dict()} if stored else {}))  # fmt: skip
        if not json and not dry_run:
            freed = sum(candidate.size for candidate in removed)
            what = f"; {len(stored.removed)} from the store" if stored else ""
            say(f"removed {counted(len(removed), 'checkpoint')}, {size(freed)}{what}")
    if problems:
        count = len(going) + (len(stored.going) if stored else 0)
        left = count - len(removed) - (len(stored.removed) if stored else 0)
        raise QuernError(f"{problems[0]}; {left} of {count} not removed")


def _policy(run: str, keep_last: int | None, keep_every: int | None) -> tuple[int, int | None, int]:
    """``keep_last``, ``keep_every`` and ``guard.health_window``, of the run's config where they are not given."""
    file = os.path.join(run, CONFIG_FILE)
    window = GuardConfig().health_window
    try:
        config = load_config(file, TrainConfig)
        window = config.guard.health_window
        keep_last = config.checkpoint.keep_last if keep_last is None else keep_last
        keep_every = config.checkpoint.keep_every if keep_every is None else keep_every
    except InputError as error:
        if keep_last is None or keep_every is None:
            raise InputError(f"{error}; give --keep-last and --keep-every to do without it") from None
    return keep_last, keep_every or None, window


class _StoredPruning:
    """What goes from the store of a run, and its removal."""

    def __init__(self, run: str, found: list[Candidate], keep_every: int | None) -> None:
        self.store = store_of(run)
        manifests = list(_manifests(found))
        check_owner(self.store, manifests)
        for ident in {manifest.run for manifest in manifests} - {""}:
            check_owner_folder(self.store, ident, run)
        whole, begun = set(self.store.checkpoints()), self.store.begun()
        self.keep = kept_in_store(found, begun, keep_every) | {step for step in begun if step >= max(whole, default=0)}
        self.steps = {step: step in whole for step in begun}
        self.going = [step for step in begun if step not in self.keep]
        self.removed: list[int] = []

    def remove(self) -> list[str]:
        """Returns what kept it from being done."""
        try:
            self.removed = prune_store(self.store, self.keep)
        except StoreError as error:
            return [str(error)]
        return []

    def to_dict(self) -> dict[str, Any]:
        rows = [{"step": step, "keep": step in self.keep, "whole": whole} for step, whole in self.steps.items()]
        return {"url": self.store.url, "checkpoints": rows, "removed": self.removed}

    def print(self) -> None:
        table = columns(">in the store", "")
        for step, whole in self.steps.items():
            table.add_row(f"{step:,}", ("stays" if step in self.keep else "goes") + ("" if whole else ", incomplete"))
        out_console().print(table)
        say(f"{len(self.going)} of {len(self.steps)} go from {self.store.url}")


def _manifests(found: list[Candidate]) -> Iterator[Manifest]:
    for candidate in found:
        with suppress(InputError):  # its row says so
            yield read_manifest(candidate.checkpoint.path)


def _confirm(going: int, stored: int, yes: bool, json: bool) -> None:
    if yes or not going + stored:
        return
    if json or not sys.stdin.isatty():
        raise InputError("--yes: expected, where nobody can be asked; --dry-run only says what would go")
    if not typer.confirm(
        f"Remove {counted(going, 'checkpoint')}{f', and {stored} from the store' if stored else ''}?", err=True
    ):
        raise QuernError("nothing was removed")


def _remove(going: list[Candidate]) -> tuple[list[Candidate], list[str]]:
    """Returns what was removed, and what could not be, with the reason."""
    removed, problems = [], []
    for candidate in going:
        try:
            remove_folder(candidate.checkpoint.path, uuid.uuid4().hex)
        except OSError as error:
            problems.append(f"{candidate.checkpoint.path}: {error.strerror or error}")
        else:
            removed.append(candidate)
    return removed, problems


def _print_candidates(found: list[Candidate]) -> None:
    table = columns(">step", ">size", "")
    for candidate in found:
        notes = ["stays" if candidate.keep else "goes"]
        notes += ["newest whole"] if candidate.newest_whole else []
        notes += ["good, or may yet be"] if candidate.protected else []
        notes += ["abandoned"] if candidate.abandoned else []
        notes += ["damaged"] if candidate.problems else []
        table.add_row(f"{candidate.checkpoint.step:,}", size(candidate.size), ", ".join(notes))
    out_console().print(table)
    for problem in (problem for candidate in found for problem in candidate.problems):
        say(problem, err_console())
    if found and not any(candidate.newest_whole for candidate in found):
        err_console().print("no checkpoint of the run's branch is whole: all stay")
    going = [candidate for candidate in found if not candidate.keep]
    say(f"{len(going)} of {len(found)} go, {size(sum(c.size for c in going))}")
