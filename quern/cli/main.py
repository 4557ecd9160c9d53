"""``quern``: the command groups."""

from __future__ import annotations

import typer

from quern import __version__
from quern.cli import bench, checkpoint, data, demo, lineage, mix, selftest, tokens, train, train_profile

app = typer.Typer(
    name="quern",
    help="Grinds a web crawl into tokens in which every token knows its URL, and tokens into a language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data")
app.add_typer(tokens.app, name="tokens")
app.add_typer(lineage.app, name="lineage")
app.add_typer(mix.app, name="mix")
train.app.command("profile")(train_profile.profile)
app.add_typer(train.app, name="train")
app.command("bench", context_settings=bench.CONTEXT)(bench.bench)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("selftest")(selftest.selftest)
app.command("demo")(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"quern {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
