"""``quern.train`` as a rank that meets faults, each once: ``chaos_rank.py PLAN CONFIG``.

PLAN is JSON: ``folder`` for marks of what has happened, and ``events``, each with ``kind``, ``step``, ``rank`` and
``place``, the method of the trainer that is entered when it happens. Each life writes the batches that it takes to
``taken`` beside the marks.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quern.train import __main__ as program
from quern.train.batches.feed import Feed
from quern.train.batches.loader import Loader
from quern.train.checkpoint.format.manifest import list_checkpoints
from quern.train.checkpoint.save.work import Work
from quern.train.checkpoint.store.store import Store
from quern.train.processes import launch
from quern.train.trainer import Trainer
from support.damage import flip as damage_file

PLACES = ("forward_backward", "clip", "update", "report", "save_if_due")


def kill(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(trainer: Trainer) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(trainer: Trainer) -> None:
    raise ZeroDivisionError("by this rank")


def broken(trainer: Trainer) -> None:
    """This rank's device fails whenever it is used by four."""
    if trainer.ranks.world == 4:
        raise ZeroDivisionError("of this device")


def kill_all(trainer: Trainer) -> None:
    os.kill(int(os.environ["CHAOS_LAUNCHER"]), signal.SIGKILL)
    time.sleep(60)  # it ends with the launcher


def damage(trainer: Trainer) -> None:
    """Of the newest checkpoint, and with it all ranks end."""
    newest = list_checkpoints(trainer.config.run_dir)[-1].path
    damage_file(max(Path(newest).glob("*.distcp"), key=lambda file: file.stat().st_size))
    kill(trainer)


def full(trainer: Trainer) -> None:
    """The disk has no room for the next checkpoint that this rank writes."""
    plain = Work.write

    def refuse(self: Work, *_: Any, **__: Any) -> Any:
        Work.write = plain  # type: ignore[method-assign]
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Work.write = refuse  # type: ignore[method-assign]


def lose(trainer: Trainer) -> None:
    """Who gives the command again removes the run's checkpoints before, and a file of the newest in the store."""
    Path(os.environ["CHAOS_LOST"]).touch()
    kill_all(trainer)


def slow(trainer: Trainer) -> None:
    """This rank's steps take twice as long from now on, until it ends."""
    plain = Trainer.forward_backward

    def slower(self: Trainer, batch: Any) -> torch.Tensor:
        began = time.perf_counter()
        loss = plain(self, batch)
        time.sleep(time.perf_counter() - began)
        return loss

    Trainer.forward_backward = slower  # type: ignore[method-assign]


def no_memory(trainer: Trainer) -> None:
    if trainer.config.activation_checkpointing != "full":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def flip(trainer: Trainer) -> None:
    """A bit of this rank's copy of the weights, in the middle of the mantissa."""
    parameter = max(trainer.model.parameters(), key=lambda own: own.numel())
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    with torch.no_grad():
        local.view(torch.int32).view(-1)[local.numel() // 2] ^= 1 << 12


KINDS: dict[str, Callable[[Trainer], None]] = {
    "kill": kill, "stop": stop, "raise": fail, "kill all": kill_all, "damage": damage, "full": full, "slow": slow,
    "no memory": no_memory, "flip": flip, "lose": lose, "broken": broken,
}  # fmt: skip


def meet(plan: dict[str, Any], place: str) -> None:
    plain = getattr(Trainer, place)

    def faulty(self: Trainer, first: Any, *rest: Any) -> Any:
        step = first if isinstance(first, int) else first.data_step  # no data is skipped here
        for number, event in enumerate(plan["events"]):
            here = (event["place"], event["rank"]) == (place, self.ranks.rank)
            if here and _due(self, event, step) and (_once(plan, number) or event["kind"] == "broken"):
                KINDS[event["kind"]](self)
        return plain(self, first, *rest)

    setattr(Trainer, place, faulty)


def _due(trainer: Trainer, event: dict[str, Any], step: int) -> bool:
    if event["kind"] != "lose" or step < event["step"]:
        return bool(step == event["step"])
    assert trainer.config.checkpoint.store is not None
    return len(Store(trainer.config.checkpoint.store).checkpoints()) > 1  # there must be one to go on from


def _once(plan: dict[str, Any], number: int) -> bool:
    try:
        os.close(os.open(os.path.join(plan["folder"], str(number)), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def spoil(steps: list[int]) -> None:
    """The batches of these data steps give gradients that are not finite, on every rank and each time."""
    plain = Trainer.clip

    def spoilt(self: Trainer, step: int) -> torch.Tensor:
        if self.data_step(step) in steps:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(float("nan"))
        return plain(self, step)

    Trainer.clip = spoilt  # type: ignore[method-assign]


def record(folder: Path) -> None:
    """Write what each step takes: its data step, and (source, epoch, window) of this rank's share, with the time."""
    folder.mkdir(exist_ok=True)
    made, taken = Loader.take, Feed.take
    given: dict[int, list[tuple[int, int, int]]] = {}

    def make(self: Loader, data_step: int) -> Any:
        batch = made(self, data_step)
        given[data_step] = [
            (int(source), int(epoch), int(window))
            for micro in batch.micro_batches
            for source, epoch, window in zip(micro.sources, micro.epochs, micro.windows, strict=True)
        ]
        return batch

    def take(self: Feed, data_step: int) -> Any:
        batch = taken(self, data_step)
        with open(folder / f"{os.environ['RANK']}-{os.getpid()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps([time.time(), data_step, given[data_step]]) + "\n")
        return batch

    Loader.take, Feed.take = make, take  # type: ignore[method-assign]


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        given = json.load(file)
    for name in PLACES:
        meet(given, name)
    spoil(given["spoilt"])
    record(Path(given["folder"]).with_name("taken"))
    launch.end_with_launcher()
    program.leave(program.main(sys.argv[2:]))
