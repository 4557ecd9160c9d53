"""A reference of every key of a config, read from its models: type, default, unit, meaning and example.

A key's docstring in its :class:`~quern.config.Section` is ``[unit] Meaning. Example: VALUE``; unit and example may be
missing. It is read from the source, so that reading a config costs nothing for it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from quern.config import Section, show
from quern.errors import InputError

__all__ = ["Key", "list_keys", "select"]

_FORM = re.compile(r"(?:\[(?P<unit>[^\]`]+)\] )?(?P<meaning>.*?)(?: Example: (?P<example>.+?)\.?)?", re.DOTALL)
_NAMES: dict[Any, str] = {
    str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any",
}  # fmt: skip
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class Key:
    """One key of a config."""

    name: str
    """Dotted, as an override gives it; ``N`` stands for an entry's number: ``sources.N.paths``."""
    type: str
    default: str | None
    """As YAML; None: the key must be given."""
    unit: str | None
    meaning: str
    example: str | None
    """A value, as an override gives it."""

    @property
    def is_section(self) -> bool:
        """Whether its value is a section of one, whose keys follow."""
        return self.type in ("section", "section or null")


def list_keys(model: type[BaseModel]) -> list[Key]:
    """All keys of a config, in the order of its models; a section's own keys follow it directly."""
    return list(_walk(model, ""))


def select(keys: list[Key], prefix: str | None) -> list[Key]:
    """The keys at and below ``prefix``; an entry's number may be given in place of ``N``.

    Raises:
        InputError: there is no such key.
    """
    if prefix is None:
        return keys
    wanted = re.sub(r"(?<=\.)\d+(?=\.|$)", "N", prefix.strip("."))
    found = [key for key in keys if key.name == wanted or key.name.startswith(wanted + ".")]
    if not found:
        near = [key.name for key in keys if wanted.rsplit(".")[-1] in key.name][:5]
        raise InputError(f"{prefix}: no such key; expected {'one such as ' + ', '.join(near) if near else 'a section'}")
    return found


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    told = _docstrings(model)
    for name, field in model.model_fields.items():
        parts = _FORM.fullmatch(" ".join(told.get(name, "").split()))
        assert parts is not None, "every text has this form"
        section = _section(field.annotation)
        meaning = parts["meaning"] or (" ".join((section[0].__doc__ or "").split("\n\n")[0].split()) if section else "")
        kind = _named(field.annotation) + _bounds(field.metadata)
        yield Key(prefix + name, kind, _default(field), parts["unit"], meaning, parts["example"])
        if section is not None:
            yield from _walk(section[0], f"{prefix}{name}.{'N.' if section[1] else ''}")


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings behind the fields of a model and of those that it inherits from."""
    found: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if not issubclass(owner, BaseModel) or owner in (BaseModel, Section):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = text
    return found


def _section(annotation: Any) -> tuple[type[BaseModel], bool] | None:
    """The model that a key's value is, and whether there are several of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    several = get_origin(annotation) in (tuple, list)
    for inner in get_args(annotation):
        if (found := _section(inner)) is not None:
            return found[0], several or found[1]
    return None


def _named(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_named(part) for part in inner))
    if origin is Literal:
        return " | ".join(show(value) for value in inner)
    if origin in (tuple, list):
        return f"list of {_named(inner[0])}"
    if origin is dict:
        return f"mapping of {_named(inner[0])} to {_named(inner[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if hasattr(annotation, "__metadata__"):
        metadata = [part for item in annotation.__metadata__ for part in getattr(item, "metadata", [item])]
        return _named(annotation.__origin__) + _bounds(metadata)
    return _NAMES[annotation]


def _bounds(metadata: list[Any]) -> str:
    limits = [f"{sign} {getattr(item, name):g}" if abs(getattr(item, name)) < 1e6 else f"{sign} {getattr(item, name)}"
              for item in metadata for name, sign in _BOUNDS.items() if hasattr(item, name)]  # fmt: skip
    return f" {', '.join(limits)}" if limits else ""


def _default(field: FieldInfo) -> str | None:
    if field.default_factory is not None:
        value = field.default_factory()  # type: ignore[call-arg]
    elif field.default is PydanticUndefined:
        return None
    else:
        value = field.default
    return "" if isinstance(value, BaseModel) else show(value)
