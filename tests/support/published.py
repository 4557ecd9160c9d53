"""Reads tests/planner/published.yaml: public runs as the planner is asked about them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from quern.model.config import ModelConfig
from quern.model.float8.recipe import Recipe
from quern.parallel.planning.context import Context
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.parallel.planning.step import Step
from quern.planner.hardware import Hardware, load_hardware
from quern.planner.time.estimate import StepTime, estimate

PUBLISHED = Path(__file__).parents[1] / "planner" / "published.yaml"
TOLD: dict[str, Any] = yaml.safe_load(PUBLISHED.read_text("utf-8"))


@dataclass(frozen=True)
class Run:
    """One entry."""

    told: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.told["name"])

    @property
    def calibration(self) -> bool:
        return bool(self.told["use"] == "calibration")

    @property
    def step(self) -> Step:
        told, model = self.told, self.told["model"]
        vocabulary = TOLD["vocabularies"][model.split("-")[0]]
        shape = ModelConfig(**TOLD["models"][model]).shape(vocabulary)
        micro_batch, number, seq_len = told["run"]
        plan = MeshPlan(**told["plan"])
        checkpointing = told["checkpointing"]
        layout: dict[str, Any] = {"micro_batch": micro_batch, "seq_len": seq_len} | told.get("layout", {})
        if checkpointing != "none":
            layout["activation_checkpointing"] = "full"
        if checkpointing == "half":
            layout["activation_checkpointing_layers"] = shape.num_layers // 2
        if told.get("compiled", True):
            layout["compile_backend"] = "inductor"
        if "float8" in told:
            layout["float8"] = Recipe(told["float8"])
        if "context" in told:
            method, heads = told["context"]
            layout["context"] = Context(method, plan.cp, heads)
        return Step(shape, Layout(torch.bfloat16, plan, **layout), number, compute_bytes=2, reduce_bytes=4)

    @property
    def hardware(self) -> Hardware:
        return machine(self.told["machine"])

    @property
    def published(self) -> float:
        """Tokens/s/GPU."""
        found = self.told["published"]
        if not isinstance(found, dict):
            return float(found)
        step = self.step
        of_token = step.shape.flops_per_token(step.layout.seq_len, causal=found["attention"] == "causal")
        return float(found["tflops"]) * 1e12 / of_token

    @property
    def predicted(self) -> StepTime:
        return _predict(self.name)

    @property
    def error(self) -> float:
        """Of tokens/s/GPU, relative; above 0 = faster than measured."""
        return self.predicted.tokens_per_gpu_s / self.published - 1

    @property
    def row(self) -> str:
        """Of docs/planner.md."""
        told = self.told
        assumed = told.get("assumed", "")
        notes = assumed if isinstance(assumed, str) else ", ".join(assumed)
        layout = str(self.step.plan).replace(" × ", "·")
        return (
            f"| {self.name} | {told['source']} | {told['machine']} | {layout} | {self.published:,.0f} | "
            f"{self.predicted.tokens_per_gpu_s:,.0f} | {100 * self.error:+.1f} % | {told['use']} | {notes} |"
        )


@cache
def _predict(name: str) -> StepTime:
    (run,) = (run for run in RUNS if run.name == name)
    return estimate(run.step, run.hardware)


@cache
def machine(name: str) -> Hardware:
    """A profile with what a run's machine has otherwise; ``speed`` scales what products and attention reach."""
    told = dict(TOLD["machines"][name])
    hardware, speed = load_hardware(told.pop("profile")), told.pop("speed", 1.0)
    slower = {key: getattr(hardware.efficiency, key) * speed for key in ("products", "float8", "attention")}
    efficiency = hardware.efficiency.model_copy(update=slower)
    return hardware.model_copy(update={**told, "efficiency": efficiency})


RUNS = [Run(told) for told in TOLD["runs"]]
