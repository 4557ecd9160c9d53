"""``quern data keys``, ``quern train keys`` and ``quern mix keys``: the reference of every key of a config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from quern.cli.output import JSON, json_stdout, out_console, reports_errors
from quern.keys import Key, list_keys, select

__all__ = ["keys_command"]


def keys_command(model: type[BaseModel]) -> Callable[..., None]:
    """A command that prints the keys of a config's ``model``."""

    @reports_errors
    def keys(
        prefix: Annotated[
            str | None, typer.Argument(help="A key or a section, such as checkpoint; default: all.", metavar="[PREFIX]")
        ] = None,
        json: bool = JSON,
    ) -> None:
        """Print every key of the config: type, default, unit, meaning and an example."""
        found = select(list_keys(model), prefix)
        with json_stdout(json) as emit:
            emit([asdict(key) for key in found])
            if not json:
                _print(found, out_console())

    return keys


def _print(keys: list[Key], console: Console) -> None:
    for key in keys:
        head = Text(key.name, style="bold")
        head.append(f"  {key.type}", style="not bold")
        if key.unit is not None:
            head.append(f"  [{key.unit}]", style="not bold")
        if not key.is_section:
            head.append("  must be given" if key.default is None else f"  default {key.default}", style="not bold dim")
        console.print(head)
        example = "" if key.example is None else f" Example: {key.name.replace('.N', '.0')}={key.example}"
        body = Text(key.meaning.replace("``", "") + example)
        console.print(Text("    ") + body if console.soft_wrap else Padding(body, (0, 0, 0, 4)))
