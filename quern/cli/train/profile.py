"""``quern train profile``: profiles where a step's time goes."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from quern import storage
from quern.cli.output import JSON, json_stdout, plain, reports_errors
from quern.errors import InputError
from quern.safe_path import module
from quern.train.init_from import load_train_config
from quern.train.processes import launch

__all__ = ["profile"]

#: Where a profile goes that is given no place.
_OUT = "quern-profile"
_STEPS = _WARM_UP = 3


@reports_errors
def profile(
    config: Annotated[str | None, typer.Argument(help="A YAML file of quern train.", metavar="CONFIG")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: model.preset=125M")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps that are traced.")] = _STEPS,
    warm_up: Annotated[int, typer.Option("--warm-up", min=1, help="Steps before them.")] = _WARM_UP,
    nproc: Annotated[int, typer.Option("--nproc", help="Ranks: as many processes on this machine.")] = 1,
    out: Annotated[str, typer.Option("--out", help="A folder for the traces and profile.json.")] = _OUT,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            "--trace", help="Train nothing: analyse this trace of torch.profiler; may be given once per rank."
        ),
    ] = None,
    json: bool = JSON,
) -> None:
    """Train CONFIG for a few steps, without saves and outside its run_dir, and print where each step's time went."""
    if trace and (config or overrides):
        raise InputError(f"--trace: expected no CONFIG beside it, got {config!r}")
    if trace and (steps, warm_up, nproc, out) != (_STEPS, _WARM_UP, 1, _OUT):
        raise InputError("--trace: trains nothing; expected no --steps, --warm-up, --nproc or --out beside it")
    if not trace and config is None:
        raise InputError("CONFIG: expected the YAML file of a training run, or --trace FILE")
    with json_stdout(json) as emit:
        if trace:
            result = _of_traces(trace)
        else:
            assert config is not None
            result = _traced(config, overrides or [], steps, warm_up, nproc, out)
        emit(result)
        if not json:
            from quern.train.profiling.report import report

            print(plain(report(result)), end="")


def _of_traces(paths: list[str]) -> dict[str, Any]:
    from quern.train.profiling.account import account
    from quern.train.profiling.result import of_traces
    from quern.train.step.trace import read_trace

    return of_traces([account(read_trace(path)) for path in paths])


def _traced(config: str, overrides: list[str], steps: int, warm_up: int, nproc: int, out: str) -> dict[str, Any]:
    resolved = load_train_config(config, overrides)
    from quern.train.profiling.run import RESULT_FILE, alone, check_steps, profile  # torch takes seconds
    from quern.train.setup import check

    check_steps(resolved, steps, warm_up)
    check(alone(resolved, out), nproc)
    if nproc == 1:
        return profile(resolved, out, steps=steps, warm_up=warm_up)
    command = module("quern.train.profiling", config, *overrides, "--quiet",
                     f"--out={out}", f"--steps={steps}", f"--warm-up={warm_up}")  # fmt: skip
    with launch.started(command, launch.environments(nproc), launch.send) as workers:
        code = launch.wait(workers) or 0
    if code:
        raise typer.Exit(code if code >= 0 else 128 - code)  # as a shell shows a death by signal
    result: dict[str, Any] = storage.read_json(os.path.join(out, RESULT_FILE))
    return result
