"""``torchrun … -m quern.train CONFIG [key=value …]``, and ``python -m quern.train`` for one process.

Exit codes are those of :data:`USAGE`; one process goes back at once. A rank ends when its launcher, torchrun or quern
train, has ended.
"""

from __future__ import annotations

from quern.safe_path import leave_working_folder

if __name__ == "__main__":
    leave_working_folder()  # before anything else is imported

import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import NoReturn

from quern.errors import STOPPED, GoBackError, QuernError, named_line
from quern.train.config import TrainConfig
from quern.train.debug import recorder
from quern.train.init_from import load_run_config
from quern.train.preflight import preflight
from quern.train.processes import launch, waiting
from quern.train.supervision import out_of_memory, tracebacks

__all__ = ["leave", "main", "open_spare", "prepare", "train"]

#: A rank that has failed closes what it has open, and has this long for it.
CLOSING_S = 5.0
_told: list[Exception] = []

USAGE = """\
usage: torchrun … -m quern.train CONFIG [key=value …]
       python -m quern.train CONFIG [key=value …]      (one process)

CONFIG is a YAML file (configs/ has ready ones); key=value overrides it, dotted: model.preset=125M. The same command
goes on with a run where it was left. quern train has --dry-run and --nproc besides.
Exit codes: 0 the run is complete, 1 it failed, 2 bad input, 3 a signal ended it after a checkpoint was saved, 4 the
same command goes back to an earlier checkpoint, 5 a rank hung, 6 a GPU is failing and a checkpoint was saved."""


def train(config: TrainConfig) -> int:
    """Run ``config`` on the ranks of the environment; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("quern").setLevel(logging.INFO)  # where it goes on, how often it saves, what has been uploaded
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for forensics of a step: there is none before the first
    if config.on_event is not None and not launch.launched() and os.environ.get("RANK", "0") == "0":
        logging.getLogger(__name__).warning("on_event: nobody starts it here: quern train does, other launchers do not")
    if config.preflight:
        preflight(config)
    while True:
        try:
            return _train(config)
        except GoBackError as error:
            if "RANK" in os.environ:  # the launcher starts all of them again
                raise
            logging.getLogger(__name__).warning("%s", error)
        gc.collect()  # the weights that are left, before those of the checkpoint take as much


def _train(given: TrainConfig) -> int:
    config = out_of_memory.settled(given)
    if config != given and os.environ.get("RANK", "0") == "0":
        now = f"micro_batch {config.micro_batch}, activation_checkpointing {config.activation_checkpointing}"
        logging.getLogger(__name__).warning("the run ran out of memory before, and goes on with %s", now)
    import torch

    from quern.train.processes.ranks import open_ranks  # torch takes seconds that a bad config need not wait for
    from quern.train.setup import open_trainer

    with ExitStack() as opened:
        ranks = opened.enter_context(
            open_ranks(config.device, config.comm.first_timeout_s, config.run_dir, bind_cores=config.process.bind_cores)
        )
        trainer = opened.enter_context(open_trainer(config, ranks))
        recorder.set_aside(config.run_dir, ranks.rank, ranks.world, cuda=ranks.device.type == "cuda")
        opened.enter_context(_telling_at_once(config.run_dir))
        try:
            trainer.fit()
        except torch.OutOfMemoryError as error:
            if out_of_memory.note(config, ranks.rank, trainer.done, error) and "RANK" not in os.environ:
                raise GoBackError(f"step {trainer.done}: {named_line(error)}") from None
            raise
        if trainer.stopped_by is None or trainer.complete:
            if ranks.first:
                _say_goodput(config.run_dir)
            return 0
        for number in (signal.SIGTERM, signal.SIGHUP):  # torchrun's word to the others, once the first has left
            signal.signal(number, signal.SIG_IGN)
        return STOPPED


def _say_goodput(run_dir: str) -> None:
    from quern.train.report.account import goodput

    with suppress(Exception):  # the run itself has ended well
        if (line := goodput(run_dir)) is not None:
            logging.getLogger(__name__).info("%s", line)


def main(arguments: Sequence[str]) -> int:
    """What ``python -m quern.train`` does with its arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    try:
        config = load_run_config(arguments[0], arguments[1:])
        return _rank(config) if "RANK" in os.environ else train(config)
    except QuernError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _rank(config: TrainConfig) -> int:
    """As :func:`train`, for one of several ranks."""
    try:
        return train(config)
    except Exception as error:
        return _tell(config.run_dir, error)


@contextmanager
def _telling_at_once(run_dir: str) -> Iterator[None]:
    """An error of one of several ranks is told before anything is closed, and closing gets :data:`CLOSING_S`: it may
    wait for what ranks do together, and the others wait for this one."""
    if "RANK" not in os.environ:
        yield
        return
    with tracebacks.writing_stacks(run_dir, int(os.environ["RANK"])):
        try:
            yield
        except Exception as error:
            end = threading.Timer(CLOSING_S, os._exit, (exit_code(error),))
            end.daemon = True
            end.start()  # before anything that may wait
            _tell(run_dir, error)
            raise


def _tell(run_dir: str, error: Exception) -> int:
    """Say once what this rank failed of; returns the exit code. A traceback goes to a file: what the rank that failed
    first has to say would be lost among those of the others, which fail of its connections."""
    code = exit_code(error)
    if error in _told:
        return code
    _told.append(error)
    rank = int(os.environ["RANK"])
    if isinstance(error, GoBackError):
        if rank == 0:  # all of them know
            logging.getLogger(__name__).warning("%s", error)
    elif isinstance(error, QuernError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif (file := tracebacks.keep(run_dir, rank, error)) is None:
        traceback.print_exception(error)
    elif not launch.launched():
        print(f"error: rank {rank}: {named_line(error)}; its traceback: {file}", file=sys.stderr, flush=True)
    if not isinstance(error, QuernError):
        recorder.keep(run_dir, rank, error)
    return code


def prepare(arguments: Sequence[str]) -> None:
    """Import what :func:`main` will need for the same arguments."""
    config = load_run_config(arguments[0], arguments[1:])
    import quern.train.setup  # noqa: F401

    if config.compile.enabled:
        import torch._inductor.compile_fx
    if config.metrics.tensorboard:
        import torch.utils.tensorboard  # noqa: F401


def open_spare(arguments: Sequence[str]) -> None:
    """Open the device of a spare place, for the same arguments.

    Raises:
        InputError: there is none.
    """
    from quern.train.processes.ranks import open_device

    config = load_run_config(arguments[0], arguments[1:])
    if open_device(config.device, bind_cores=config.process.bind_cores).type == "cuda":
        import torch

        torch.cuda.synchronize()  # makes the context


def exit_code(error: Exception) -> int:
    """With which a rank ends that failed of it."""
    return error.exit_code if isinstance(error, QuernError) else 1


def leave(code: int) -> NoReturn:
    """End the process; that of a rank without ending the interpreter first. gloo's threads let go of the last
    collective's tensors when they get to it, and ask for the interpreter then; one that is ending would end the process
    with SIGABRT."""
    if "RANK" not in os.environ:
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # its reader may be gone, and the code is what counts
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    waiting.wait(partial(prepare, sys.argv[1:]), partial(open_spare, sys.argv[1:]))
    launch.end_with_launcher()
    leave(main(sys.argv[1:]))
