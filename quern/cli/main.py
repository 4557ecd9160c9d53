"""``quern``: the command groups, imported only when called, since the data libraries take a second to import."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from quern import __version__
from quern.errors import STDOUT, of_stdout
from quern.safe_path import leave_working_folder

if TYPE_CHECKING:
    import typer

__all__ = ["main"]


def _group(app: typer.Typer, name: str) -> None:
    module = import_module(f"quern.cli.{name}")
    app.add_typer(module.app, name=name)


def _train(app: typer.Typer, name: str) -> None:
    profile = import_module("quern.cli.train.profile").profile
    train = import_module("quern.cli.train").app
    if all(command.name != "profile" for command in train.registered_commands):
        train.command("profile")(profile)
    app.add_typer(train, name=name)


def _bench(app: typer.Typer, name: str) -> None:
    bench = import_module("quern.cli.bench")
    app.command(name, context_settings=bench.CONTEXT)(bench.bench)


def _command(app: typer.Typer, name: str) -> None:
    app.command(name)(getattr(import_module(f"quern.cli.{name}"), name))


#: In the order in which help lists them.
_COMMANDS: dict[str, Callable[[typer.Typer, str], None]] = {
    "data": _group, "tokens": _group, "lineage": _group, "mix": _group, "plan": _group, "train": _train,
    "bench": _bench, "checkpoint": _group, "selftest": _command, "doctor": _command, "demo": _command,
}  # fmt: skip


#: What help lists, so that it imports none of them.
_HELP = {
    "data": "Crawl → documents → duplicates → tokens.",
    "tokens": "Inspect, export and import token shards.",
    "lineage": "Trace a URL to every training step that read it, and a step to its documents.",
    "mix": "Weigh sources, select documents, and show the mixture and order of training data.",
    "plan": "Say whether a model fits on a cluster, how fast it trains there, and in which layout.",
    "train": "Train CONFIG: shards → steps → checkpoints. quern train CONFIG is quern train run CONFIG.",
    "bench": "Measure the trainer over random tokens: tokens a second, MFU, step time, memory; one row per "
    "combination.",
    "checkpoint": "List, verify, fetch, compare, rewrite, upcycle, prune, export, import and sample checkpoints.",
    "selftest": "Train on every layout and compare losses, gradients, moments and weights with those of one process, "
    "in float64.",
    "doctor": "Check this machine, or under torchrun or srun all of them, and name those that would make a run fail or "
    "slow.",
    "demo": "Write a sample site of 320 pages, process it into tokens, compare every verdict with what a person "
    "expects, and train a small model on them that is killed, resumes, and is compared with n-gram models; then trace "
    "a page from its URL to the steps that read it, and back; train a swarm of tiny runs on two kinds of page, whose "
    "losses propose weights for them; and purge a domain, verify the purge, and resume without it.",
}


def _listed(app: typer.Typer, name: str) -> None:
    import typer

    if _COMMANDS[name] in (_command, _bench):
        app.command(name, help=_HELP[name])(lambda: None)
        return
    group = typer.Typer(help=_HELP[name])
    group.callback()(lambda: None)
    app.add_typer(group, name=name)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"quern {__version__}")
        sys.exit()


def _build(names: Iterable[str], *, listed: bool = False) -> typer.Typer:
    import typer  # takes a moment, in which Ctrl-C is one line already

    told = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")

    def root(version: bool = told) -> None:
        pass

    app = typer.Typer(
        name="quern",
        help="Turns a web crawl into tokens, each traceable to its URL, and tokens into a language model.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(root)
    for name in names:
        (_listed if listed else _COMMANDS[name])(app, name)
    return app


@cache
def _whole() -> typer.Typer:
    return _build(_COMMANDS)


def __getattr__(name: str) -> Any:
    """``app``: all groups, for those who do not know which one is asked for."""
    if name == "app":
        return _whole()
    raise AttributeError(name)


class _Output(io.TextIOWrapper):
    """Standard output whose errors say so; of those of other files without a name nothing is known."""

    @classmethod
    def instead_of(cls, stream: io.TextIOWrapper) -> Self:
        settings = {name: getattr(stream, name) for name in ("encoding", "errors", "line_buffering", "write_through")}
        return cls(stream.buffer, **settings)

    def write(self, text: str) -> int:
        with of_stdout():
            return super().write(text)

    def flush(self) -> None:
        with of_stdout():
            super().flush()


def main() -> None:
    """The console script."""
    leave_working_folder()
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Output.instead_of(sys.stdout)
    try:
        try:
            if sys.argv[1:] in ([], ["--help"]):
                _build(_COMMANDS, listed=True)()
            else:
                (_build([asked]) if asked in _COMMANDS else _whole())()
        finally:
            if sys.stdout is not None:  # it was closed
                sys.stdout.flush()  # report write errors here, not at the interpreter's end
    except OSError as error:
        if error.filename != STDOUT or error.errno == errno.EPIPE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drop the buffered output
        print(f"error: {STDOUT}: {error.strerror}; what the command has done otherwise stands", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
