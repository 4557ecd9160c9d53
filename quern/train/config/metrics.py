"""The keys of what a run measures: held-out loss, metrics, and where they are sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from quern.config import Section
from quern.train.config.numbers import Count, NonNegative

__all__ = ["HeldOutConfig", "MetricsConfig", "ValidationConfig"]

Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


class HeldOutConfig(Section):
    """A held-out set beside those of the sources."""

    name: Text
    """What its loss is called in the metrics. Example: books"""
    path: str
    """``RUN/tokens/<source>`` of a data run of the same encoding, and no source of the mixture. Example:
    runs/books/tokens/books"""


class ValidationConfig(Section):
    """Loss on the held-out documents (``path + '.val'``)."""

    later: ClassVar[Mapping[str, Any]] = {"sets": ()}
    interval: NonNegative = 500
    """[steps] Steps between validations; 0 = only at the end."""
    windows: Count | None = 256
    """[windows] Windows of each source, from its start; null = all."""
    sets: tuple[HeldOutConfig, ...] = ()
    """Held-out sets beside those of the sources. Example: [{name: books, path: runs/books/tokens/books}]"""

    @model_validator(mode="after")
    def _named(self) -> Self:
        names = [given.name for given in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"sets: {max(names, key=names.count)!r} is given twice; expected one entry a name")
        return self


class MetricsConfig(Section):
    """The metrics written for each step."""

    later: ClassVar[Mapping[str, Any]] = {
        "trackers": (), "project": None, "run_name": None, "group": None, "tags": (), "trackers_timeout_s": 30.0,
    }  # fmt: skip
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Where metrics are sent besides; each but tensorboard is an extra, ``pip install 'quern[wandb]'``. Example:
    [wandb]"""
    project: Text | None = None
    """The trackers' project, MLflow's experiment; null = ``WANDB_PROJECT``, ``MLFLOW_EXPERIMENT_NAME`` or
    ``TRACKIO_PROJECT``, else quern. Example: quern-8b"""
    run_name: Text | None = None
    """The run's name in the trackers; null = the name of ``run_dir``. Example: 8b-first"""
    group: Text | None = None
    """What joins the runs of a tracker that are one run's branches; null = ``WANDB_RUN_GROUP``, else the run's name and
    a random number. Example: 8b"""
    tags: tuple[Text, ...] = ()
    """Tags of the run in the trackers. Example: [ablation, fp8]"""
    trackers_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    """[seconds] How long the end of a run waits for a tracker, and after how long without an answer it is said that one
    hangs."""
    live: bool = True
    """Show a line on stderr with loss, speed and time to go."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """[TFLOP/s] Dense peak of one device in the compute precision; null = by the device's name, else MFU is null.
    Example: 989"""

    @property
    def sent_to(self) -> tuple[str, ...]:
        """The trackers that are processes of their own."""
        return tuple(name for name in self.trackers if name != "tensorboard")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"trackers: expected each once, got {', '.join(self.trackers)}")
        if "tensorboard" in self.trackers and not self.tensorboard:
            raise ValueError("trackers: names tensorboard, and tensorboard is false; expected one of the two changed")
        for name in ("project", "run_name", "group", "tags", "trackers_timeout_s"):
            if not self.sent_to and getattr(self, name) != self.later[name]:
                raise ValueError(f"{name}: expected only with trackers wandb, mlflow or trackio")
        return self
