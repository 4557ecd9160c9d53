"""A group of commands of which one need not be named: ``quern train CONFIG`` is ``quern train run CONFIG``."""

from __future__ import annotations

from typing import Any

import typer.core

__all__ = ["with_default"]


def with_default(name: str) -> type[typer.core.TyperGroup]:
    """A class for ``typer.Typer(cls=…)`` whose groups call the command ``name`` where no other one is named."""

    class Group(typer.core.TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            named = not args or args[0] == "--help" or args[0] in self.commands
            return super().parse_args(ctx, args if named else [name, *args])

    return Group
