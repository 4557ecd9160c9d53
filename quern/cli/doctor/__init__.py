"""``quern doctor``: finds machines that would make a run fail or slow, before it begins."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from quern.cli.doctor.table import as_data, show
from quern.cli.output import JSON, json_stdout, out_console, reports_errors
from quern.doctor.place import place_of
from quern.doctor.run import Options, Result, check, check_cluster, options_of
from quern.errors import InputError
from quern.train.init_from import load_run_config
from quern.train.processes import launch

__all__ = ["doctor"]


Device = StrEnum("Device", ["auto", "cpu", "cuda"])


@reports_errors
def doctor(
    config: Annotated[str | None, typer.Argument(help="A training config, for which is checked.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, dotted: run_dir=/shared/runs/a")] = None,
    share: Annotated[str | None, typer.Option(help="A folder or store that all ranks see; else the run's.")] = None,
    id: Annotated[str | None, typer.Option(help="Tells checks in --share apart; else the launcher's.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for which others wait for a node at most.")] = 120,
    rounds: Annotated[int, typer.Option(min=0, help="Partners of each node, and of each GPU of it, in pairs.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Readings of each measurement; their median counts.")] = 9,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is one.")] = Device.auto,
    disk: Annotated[list[str] | None, typer.Option(help="A folder whose disk is measured; may be repeated.")] = None,
    store: Annotated[str | None, typer.Option(help="A path or URL below which an object is tried.")] = None,
    data: Annotated[bool, typer.Option("--data", help="Check a Ray cluster (RAY_ADDRESS) for data runs.")] = False,
    json: bool = JSON,
) -> None:
    """Check this machine, or under torchrun or srun all of them, and name those that would make a run fail or slow.

    Each node is measured alone first, without a rendezvous; then readings are exchanged through files in --share,
    and links are measured in pairs and rings of those that answered. A machine is compared with the median of the
    others. Exit code 1: something was found.
    """
    options = Options(share, id, timeout, repeats, rounds, device.value, tuple(disk or ()), store)
    if data and config is not None:
        raise InputError("--data: expected without CONFIG, which is one of training; give --disk and --store")
    launch.end_with_launcher()
    if config is not None:
        options = options_of(load_run_config(config, overrides or ()), options)
    with json_stdout(json) as emit:

        def tell(result: Result) -> None:
            emit(as_data(result))
            if not json:
                show(result, out_console())

        if data:
            tell(result := check_cluster(options))
            found = len(result.findings)
        else:
            found = check(place_of(), options, tell)
    if found:
        raise typer.Exit(1)
