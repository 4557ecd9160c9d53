"""A run's store for the command line: its address, time-outs and owner.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import yaml

from quern import storage
from quern.config import parse_yaml
from quern.errors import InputError, one_line
from quern.remote.retry import Backoff
from quern.train.checkpoint.format.manifest import CONFIG_FILE, Manifest, checkpoint_name, step_of
from quern.train.checkpoint.store.store import Store

__all__ = ["check_owner", "configured_store", "is_url", "open_source", "open_store", "saved_config", "store_of"]

#: How long one request is tried while somebody waits. A trainer, which has all night, waits longer.
PATIENCE_S = 30.0


def is_url(source: str) -> bool:
    """Whether ``source`` is a store's address, not a path."""
    return "://" in source


def open_store(url: str) -> Store:
    """The store at ``url``, with time-outs suited to a command.

    Raises:
        InputError: there is no such kind of store.
    """
    return Store(url, backoff=Backoff(cap_s=5.0, budget_s=PATIENCE_S))


def open_source(url: str) -> tuple[Store, int | None]:
    """The store at ``url``, and the step if ``url`` is the address of one checkpoint in it."""
    store, _, name = url.removesuffix("/").rpartition("/")
    step = step_of(name)
    if step is not None and store and name == checkpoint_name(step):
        return open_store(store), step
    return open_store(url), None


def saved_config(folder: str) -> dict[str, Any]:
    """The ``config.yaml`` in the folder of a run or a checkpoint, unchecked; empty where there is none.

    Raises:
        InputError: the file is damaged.
    """
    file = os.path.join(folder, CONFIG_FILE)
    if not os.path.isfile(file):
        return {}
    try:
        config = parse_yaml(storage.read_bytes(file).decode(), file)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{file}: not valid YAML: {one_line(error)}") from None
    return config if isinstance(config, dict) else {}


def configured_store(folder: str) -> str | None:
    """``checkpoint.store`` of the ``config.yaml`` in the folder of a run or a checkpoint; None where there is none.

    Raises:
        InputError: the file is damaged, or the field is no text.
    """
    file, config = os.path.join(folder, CONFIG_FILE), saved_config(folder)
    section = config.get("checkpoint")
    store = section.get("store") if isinstance(section, dict) else None
    if store is not None and not isinstance(store, str):
        raise InputError(f"{file}: checkpoint.store: expected a store's address, got {store!r}")
    return store


def store_of(run: str) -> Store:
    """The store of the run in the folder ``run``.

    Raises:
        InputError: it has none.
    """
    url = configured_store(run)
    if url is None:
        raise InputError(f"{os.path.join(run, CONFIG_FILE)}: checkpoint.store: expected a store's address, is not set")
    return open_store(url)


def check_owner(store: Store, ours: Iterable[Manifest]) -> None:
    """Refuse a store whose newest checkpoint is another run's than ``ours``; an unknown one passes.

    Raises:
        InputError: naming both.
        StoreError: the store cannot be read.
    """
    ids = {manifest.run for manifest in ours} - {""}
    steps = store.checkpoints()
    if not ids or not steps:
        return
    theirs = store.manifest(steps[-1]).run
    if theirs and theirs not in ids:
        raise InputError(
            f"{store.url}: holds the checkpoints of run {theirs}, not those of run {', '.join(sorted(ids))}"
        )
