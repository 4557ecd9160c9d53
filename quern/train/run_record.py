"""Writes the records of a training run: ``config.yaml``, ``run.json``, and the messages at its start."""

from __future__ import annotations

import logging
import math
import os
import shutil

import torch

from quern import __version__, storage
from quern.config import digest, dump_yaml, load_config
from quern.errors import InputError
from quern.model.config import ModelShape
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan
from quern.train.batches.corpus import Corpus
from quern.train.begin import Start
from quern.train.checkpoint.format.manifest import CONFIG_FILE
from quern.train.config import TrainConfig
from quern.train.config.differences import differing
from quern.train.step.metrics import Utilisation
from quern.train.step.schedule import learning_rate
from quern.train.summary import checkpoint_size, float8, step_of

__all__ = ["RUN_FILE", "changes", "check_run_dir", "describe", "differences", "tell"]

log = logging.getLogger(__name__)

RUN_FILE = "run.json"


def check_run_dir(path: str, trainer: str = "quern") -> None:
    """A place where a training run of ``trainer`` can be, and where no other run is: a data run's ``run.json`` is its
    identity. ``trainer``: ``quern``, or ``other`` of a run whose weights are not quern's.

    Raises:
        InputError: what is there instead.
    """
    if not path or "\0" in path:
        raise InputError(f"run_dir: expected the path of a folder, got {path!r}")
    if not storage.is_local(path):
        raise InputError(f"run_dir: expected a folder on a file system, got {path!r}")
    above = os.path.abspath(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise InputError(f"run_dir: expected a folder, got {path!r}, and {above} is none")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InputError(f"run_dir: expected a folder that can be written to, got {path!r}")
    described = os.path.join(path, RUN_FILE)
    if os.path.exists(described):
        run = storage.read_json(described)
        if not isinstance(run, dict) or run.get("kind") != "train":
            raise InputError(f"run_dir: {path!r} holds another run ({described}); give a folder of its own")
        if run.get("trainer", "quern") != trainer:
            of = "quern train" if trainer == "other" else "a trainer that reads by quern.batches"
            raise InputError(f"run_dir: {path!r} holds a run of {of} ({described}); give a folder of its own")


def tell(config: TrainConfig, shape: ModelShape, layout: Layout, step: int) -> None:
    """Log what changed in the config since the last start, a line a key, and whether the disk may become full. Before
    :func:`describe`. ``step``: at which the run goes on."""
    for line in changes(config, step):
        log.info("%s", line)
    size = checkpoint_size(step_of(config, shape, layout), config)["bytes"]
    free = shutil.disk_usage(config.run_dir).free
    if config.checkpoint.local is None and free < 2 * size:
        log.warning(
            "%s: %.1f GB are free, and a checkpoint has %.1f GB, of which one is written before another is removed: "
            "saves may fail; free some, or lower checkpoint.keep_last",
            config.run_dir, free / 1e9, size / 1e9,
        )  # fmt: skip


def changes(config: TrainConfig, step: int) -> list[str]:
    """``key: before → after`` of each key in which the config in the run's folder differs, and what that makes of the
    learning rate at ``step``; none where there is no such config."""
    file = os.path.join(config.run_dir, CONFIG_FILE)
    try:
        before = load_config(file, TrainConfig)
    except InputError:  # none yet, or of a version with other keys
        return []
    lines = differences(before, config)
    if step:
        had, has, gets = (
            learning_rate(at, own.steps, own.optimizer.lr, own.schedule)
            for at, own in ((step - 1, before), (step - 1, config), (step, config))
        )
        if not math.isclose(had, has, rel_tol=0.01):
            lines.append(f"learning rate: step {step - 1:,} had {had:.4g}, step {step:,} gets {gets:.4g}")
    return lines


def differences(before: TrainConfig, after: TrainConfig) -> list[str]:
    """``config: key: before → after`` of each key in which two configs differ, but for ``run_dir``."""
    found = differing(before.model_dump(mode="json"), after.model_dump(mode="json"))
    return [f"config: {name}: {had} → {has}" for name, had, has in found]


def describe(
    config: TrainConfig, corpus: Corpus, shape: ModelShape, plan: MeshPlan, utilisation: Utilisation, start: Start
) -> None:
    """Write ``config.yaml`` and ``run.json``; for rank 0."""
    in_float8 = float8(config, shape, plan)
    if in_float8 is not None and in_float8["left_out"]:
        log.info("in %s, not in FP8: %s of every block", config.precision, ", ".join(in_float8["left_out"]))
    storage.publish_bytes(os.path.join(config.run_dir, CONFIG_FILE), dump_yaml(config).encode())
    storage.write_json(
        os.path.join(config.run_dir, RUN_FILE),
        {
            "kind": "train",
            "config_digest": digest(config),
            "model": shape.model_dump(mode="json"),
            "parameters": shape.num_parameters,
            "layout": plan.sizes(),
            "flash_attention": config.flash_attention,
            "float8": in_float8,
            "optimizer": {"moments": config.optimizer.moments, "gradients": config.optimizer.gradients},
            "order": start.mixture.order.hash,
            "sources": dict(zip(corpus.ids, [source.path for source in config.data], strict=True)),
            "mfu": utilisation.describe(),
            "versions": {"quern": __version__, "torch": torch.__version__},
            "device": torch.cuda.get_device_name() if config.device != "cpu" and torch.cuda.is_available() else None,
        },
    )
