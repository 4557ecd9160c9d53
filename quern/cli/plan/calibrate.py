"""``quern plan calibrate``: measures this machine, and writes a profile for ``--gpu``."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from quern import storage
from quern.cli.output import JSON, json_stdout, reports_errors, say
from quern.errors import InputError
from quern.train.processes import launch

__all__ = ["calibrate"]


@reports_errors
def calibrate(
    out: Annotated[str, typer.Argument(help="A new YAML file, which --gpu takes.", metavar="OUT.yaml")],
    like: Annotated[str | None, typer.Option(help="Profile of what is not measured; else the GPU's own.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA where there is one.")] = "auto",
    precision: Annotated[Literal["bf16", "fp16", "fp32"] | None, typer.Option(help="bf16, on a CPU fp32.")] = None,
    model: Annotated[str | None, typer.Option(help="Preset with the shapes: llama3-8b, on a CPU 125M.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=128, help="Tokens: 8192, on a CPU 1024.")] = None,
    json: bool = JSON,
) -> None:
    """Measure this machine, and under torchrun or srun its links, and write them as a profile; figures that are not
    measured are those of --like. Each has its source."""
    from quern.config import validate
    from quern.doctor.calibrate import calibrate as calibrated
    from quern.model.config import ModelConfig
    from quern.train.processes.ranks import open_ranks
    from quern.train.step.precision import precision_of

    if storage.exists(out) or not out.endswith((".yaml", ".yml")):
        raise InputError(f"{out}: expected a new file with a name that ends in .yaml")
    launch.end_with_launcher()
    with json_stdout(json) as emit, open_ranks(device) as ranks:
        cuda = ranks.device.type == "cuda"
        config = validate({"preset": model or ("llama3-8b" if cuda else "125M")}, ModelConfig, "--model")
        dtype = precision_of(precision or ("bf16" if cuda else "fp32")).compute
        told = calibrated(out, like, config.shape(128_256), seq_len or (8192 if cuda else 1024), dtype, ranks)
        if ranks.first:
            emit(told)
            for field, source in () if json else told["sources"].items():
                say(f"{field}: {told[field]} ({source})")
