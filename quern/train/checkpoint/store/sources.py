"""Resolves a user's argument (a checkpoint, a training run or a store) to a checkpoint.

Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from quern.errors import InputError, QuernError
from quern.remote.retry import StoreError
from quern.train.checkpoint.format.file_locations import PLACES_FILE
from quern.train.checkpoint.format.manifest import (
    MANIFEST_FILE,
    METADATA_FILE,
    Manifest,
    checkpoint_name,
    checkpoints_folder,
    list_checkpoints,
    read_manifest,
    step_of,
)
from quern.train.checkpoint.store.store import Store
from quern.train.checkpoint.store.stored import configured_store, is_url, open_source, open_store
from quern.train.history.branch import abandoned_in

__all__ = ["CircuitBreakerStore", "Source", "find_source"]

T = TypeVar("T")


class CircuitBreakerStore:
    """A circuit breaker: once a store could not be reached, it is asked no more, so that a user waits only once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.trouble: str | None = None

    def ask(self, action: Callable[[Store], T]) -> T:
        """The result of ``action``.

        Raises:
            StoreError: why there is no answer.
        """
        if self.trouble is not None:
            raise StoreError(self.trouble, transient=True)
        try:
            return action(self.store)
        except StoreError as error:
            if error.transient:
                self.trouble = str(error)
            raise

    def steps(self) -> list[int]:
        """Steps of the store's checkpoints; none where it cannot be told."""
        try:
            return self.ask(Store.checkpoints)
        except QuernError as error:
            self.trouble = str(error)
            return []


@dataclass(frozen=True)
class Source:
    """A folder or store in which checkpoints are searched."""

    name: str
    """As it was given."""
    run: str | None
    """The run's folder, whose ledger tells its branch."""
    folders: Mapping[int, str]
    """By step."""
    store: CircuitBreakerStore | None
    step: int | None
    """The one that was asked for."""

    def candidates(self, passed: list[str]) -> Iterator[tuple[int, Manifest]]:
        """Steps with their manifests, the one to be taken before others first: that of the step that was asked for, or
        the newest of the run's branch; in a store, whose run's ledger is not at hand, the one that was saved last. Why
        one is left out goes into ``passed``.

        Raises:
            InputError: there is none.
            QuernError: the store that may have one cannot be read.
        """
        if self.step is not None:
            yield self.step, self.manifest(self.step)
            return
        steps = set(self.folders) | set(self.store.steps() if self.store else ())
        if not steps:
            trouble = self.store.trouble if self.store else None
            if trouble is not None:
                raise QuernError(trouble)
            raise InputError(f"{self.name}: expected a checkpoint, or a training run or store that has one")
        if self.run is None:
            yield from self._last_saved_first(steps, passed)
            return
        for step in sorted(steps, reverse=True):
            try:
                manifest = self.manifest(step)
                left = abandoned_in(self.run, manifest)
            except QuernError as error:
                left = str(error)
            if left is None:
                yield step, manifest
            else:
                passed.append(f"passed over: {checkpoint_name(step)}: {left}")

    def _last_saved_first(self, steps: set[int], passed: list[str]) -> Iterator[tuple[int, Manifest]]:
        """By how far the ledger went, which is ever longer; what a later one went back behind is left out."""
        manifests = []
        for step in steps:
            try:
                manifests.append(self.manifest(step))
            except QuernError as error:
                passed.append(f"passed over: {error}")
        lowest: int | None = None
        for manifest in sorted(manifests, key=lambda found: (found.ledger_offset, found.step), reverse=True):
            if lowest is None or manifest.step < lowest:
                lowest = manifest.step
                yield manifest.step, manifest
            else:
                passed.append(f"passed over: {checkpoint_name(manifest.step)}: was saved before step {lowest}")

    def manifest(self, step: int) -> Manifest:
        """The manifest in the checkpoint's folder; where there is none to read, the store's.

        Raises:
            InputError: neither has a sound one.
            StoreError: the store, which might, cannot be read.
        """
        folder, why = self.folders.get(step), None
        if folder is not None:
            try:
                return read_manifest(folder)
            except InputError as error:
                why = error
        if self.store is not None:
            try:
                return self.store.ask(lambda store: store.manifest(step))
            except QuernError as error:
                if why is None:
                    raise
                raise InputError(f"{why}; {error}") from None
        raise why or InputError(f"{self.name}: has no checkpoint of step {step}")


def find_source(source: str, step: int | None = None) -> Source:
    """What ``source`` is: a checkpoint's folder, a run's folder, a store's address, or a checkpoint's in a store;
    ``step``: of the checkpoint that is wanted.

    Raises:
        InputError: it is none of these, or another checkpoint than that of ``step``.
    """
    if is_url(source):
        store, named = open_source(source)
        if step is not None and named is not None and step != named:
            raise InputError(f"{source}: --step: expected {named}, as the address says, got {step}")
        return Source(source, None, {}, CircuitBreakerStore(store), named if step is None else step)
    if not os.path.isdir(source):
        raise InputError(f"{source}: no such folder; expected a checkpoint, a training run or a store's address")
    if any(os.path.lexists(os.path.join(source, name)) for name in (MANIFEST_FILE, METADATA_FILE, PLACES_FILE)):
        return _checkpoint(source, step)
    store_url = configured_store(source)
    folders = {checkpoint.step: checkpoint.path for checkpoint in list_checkpoints(source)}
    if not folders and store_url is None:
        raise InputError(f"{source}: expected a checkpoint, or a training run that has one")
    return Source(source, source, folders, _breaker(store_url, needed=not folders), step)


def _checkpoint(folder: str, step: int | None) -> Source:
    found = step_of(os.path.basename(os.path.abspath(folder)))
    named = read_manifest(folder).step if found is None else found
    if step is not None and step != named:
        raise InputError(f"{folder}: --step: is the checkpoint of step {named}, not of {step}")
    root = os.path.dirname(os.path.abspath(folder))
    run = os.path.dirname(root)
    in_run = root == checkpoints_folder(run)
    store_url = configured_store(run) if in_run else None
    if store_url is None:
        with suppress(InputError):  # a damaged file of the checkpoint, which is to be replaced
            store_url = configured_store(folder)
    return Source(folder, run if in_run else None, {named: folder}, _breaker(store_url, needed=False), named)


def _breaker(url: str | None, *, needed: bool) -> CircuitBreakerStore | None:
    """None where there is none, or one that this machine cannot open and that is not ``needed``."""
    try:
        return None if url is None else CircuitBreakerStore(open_store(url))
    except InputError:
        if needed:
            raise
        return None
