"""Loads a validated config: a YAML file with dotted ``key=value`` overrides becomes a frozen, typed object.

Every error is one line that names the file (or the override), the field, the value and what was expected.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast, get_args

import yaml
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from quern.errors import InputError, one_line

__all__ = ["Section", "canonical_json", "digest", "dump_yaml", "given_config", "load_config", "parse_overrides",
           "parse_yaml", "read_yaml", "show", "validate"]  # fmt: skip


class Section(BaseModel):
    """A part of a config: unknown keys and infinite numbers are refused, nothing changes later.

    :func:`load_config` also refuses values of another kind; from code, pydantic's own conversions hold.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    later: ClassVar[Mapping[str, Any]] = {}
    """Keys that runs of earlier versions do not have, with their defaults: at its default such a key is left out of
    what is written and hashed, so that these runs are known by the same digests as before."""

    @model_serializer(mode="wrap")
    def _without_later(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = handler(self)
        return {key: value for key, value in plain.items() if key not in self.later or _changed(value, self.later[key])}


def _changed(value: Any, default: Any) -> bool:
    """Whether a dumped value is not the default; JSON has lists in place of tuples."""
    return bool(value != default and not (isinstance(default, tuple) and value == list(default)))


Model = TypeVar("Model", bound=BaseModel)


#: Bounds of YAML, far beyond what a person writes: what stands in a run's folder may be anybody's.
_MOST_CHARS, _MOST_NODES = 1 << 20, 100_000
#: Those of a config: a program may have written all paths of a crawl into it.
_CONFIG_CHARS, _CONFIG_NODES = 16 << 20, 1_000_000


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice (plain YAML keeps the last one silently) and reads 1e-3 as a number."""


class _Dumper(yaml.SafeDumper):
    """Writes what :class:`_Loader` reads back."""


for _yaml in (_Loader, _Dumper):
    _yaml.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z"),
        list("-+.0123456789"),
    )


def _mapping_without_repeats(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} cannot be a key", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return dict(loader.construct_mapping(node, deep=True))


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


def parse_overrides(overrides: Iterable[str]) -> list[tuple[str, Any]]:
    """``["a.b=1", "sources.0.paths=[x]"]`` → pairs of dotted key and YAML-parsed value."""
    pairs = []
    for text in overrides:
        key, sep, value = text.partition("=")
        if not sep or not key.strip():
            raise InputError(f"override {text!r}: expected key=value, for example workers=4")
        try:
            pairs.append((key.strip(), _value(value)))
        except yaml.YAMLError as error:
            raise InputError(f"override {text!r}: the value is not YAML ({_one_line(error)})") from None
    return pairs


def parse_yaml(text: str, what: str, chars: int = _MOST_CHARS, nodes: int = _MOST_NODES) -> Any:
    """Parse YAML of at most ``chars`` characters and ``nodes`` keys and values; errors name ``what``.

    Raises:
        InputError: it is too large, nested too deeply, or its aliases repeat too much.
        YAMLError: it is no YAML.
    """
    if len(text) > chars:
        raise InputError(f"{what}: expected at most {chars:,} characters, has more")
    try:
        value = yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise InputError(f"{what}: is nested too deeply") from None
    left, stack = nodes, [value]
    while stack and left:
        left -= 1
        found = stack.pop()
        if isinstance(found, dict | list) and len(found) <= left:
            stack += [*found, *found.values()] if isinstance(found, dict) else found
        elif isinstance(found, dict | list):
            left = 0
    if not left:  # an alias costs nothing until somebody walks through it
        raise InputError(f"{what}: holds more than {nodes:,} keys and values, aliases counted each time")
    return value


def _value(text: str) -> Any:
    if text.startswith("*"):  # a glob; there is nothing in an override that a YAML alias could point to
        return text
    return parse_yaml(text, "override") if text else None


def load_config(
    path: str | os.PathLike[str] | None,
    model: type[Model],
    overrides: Iterable[str] = (),
    *,
    complete: Callable[[dict[str, Any]], None] | None = None,
) -> Model:
    """Read ``path`` (YAML), apply ``overrides``, validate as ``model``.

    ``complete`` may put keys that are not given into what has been read, before it is validated.

    Raises:
        InputError: one line naming file or override, field, value and expectation.
    """
    name = os.fspath(path) if path is not None else "(no file)"
    raw = read_yaml(path) if path is not None else {}
    overridden = []
    for key, value in parse_overrides(overrides):
        _set(raw, key, value)
        overridden.append(key)
    if complete is not None:
        try:
            complete(raw)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    return validate(raw, model, name, overridden)


def given_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | Model, model: type[Model], overrides: Sequence[str] = ()
) -> Model:
    """A config that Python code gives: a YAML file with ``overrides``, a mapping, or the ``model`` itself.

    Raises:
        InputError: as :func:`load_config`; or overrides are given with something else than a file.
    """
    if isinstance(config, str | os.PathLike):
        return load_config(config, model, overrides)
    if overrides:
        raise InputError("overrides: expected only with a config file; change the mapping instead")
    return config if isinstance(config, model) else validate(cast(Mapping[str, Any], config), model, "config")


def read_yaml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file holds an empty one.

    Raises:
        InputError: it cannot be read, is no YAML, or holds something else; one line that names the file.
    """
    name = os.fspath(path)
    try:
        with open(path, encoding="utf-8") as file:
            raw = parse_yaml(file.read(_CONFIG_CHARS + 1), name, _CONFIG_CHARS, _CONFIG_NODES)
    except FileNotFoundError:
        raise InputError(f"{name}: no such config file") from None
    except IsADirectoryError:
        raise InputError(f"{name}: is a directory, expected a YAML file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise InputError(f"{name}: not valid YAML: {_one_line(error)}") from None
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise InputError(f"{name}: expected a mapping of keys at the top, got {type(raw).__name__}")
    return raw


def validate(raw: Mapping[str, Any], model: type[Model], name: str, overridden: Sequence[str] = ()) -> Model:
    """``raw`` as ``model``; errors begin with ``name``, and name the field.

    Raises:
        InputError: one line naming field, value and expectation.
    """
    try:  # as JSON, whose strict rules know no "4" for 4 and no true for 1, but a list for a tuple
        return model.model_validate_json(json.dumps(raw, default=str), strict=True)
    except ValidationError as error:
        raise InputError(_explain(error, model, name, overridden)) from None


def _one_line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
    return where + str(getattr(error, "problem", None) or one_line(error))


def _set(tree: Any, dotted: str, value: Any) -> None:
    parts = dotted.split(".")
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        here = ".".join(parts[: depth + 1])
        if isinstance(tree, list):
            if not part.isdecimal() or int(part) > len(tree):
                size = len(tree)
                known = ("", "0, or ")[size] if size < 2 else f"0 to {size - 1}, or "
                raise InputError(
                    f"override {dotted}: {here}: expected a list index, {known}{size} to append, got {part!r}"
                )
            index = int(part)
            if index == len(tree):
                tree.append({} if not last else None)
            if last:
                tree[index] = value
            tree = tree[index]
        elif isinstance(tree, dict):
            if last:
                tree[part] = value
            elif tree.get(part) is None:
                tree[part] = [] if parts[depth + 1].isdecimal() else {}
            tree = tree[part]
        else:
            above = ".".join(parts[:depth])
            raise InputError(f"override {dotted}: {above} is a single value ({tree!r}) and has no key {part!r}")


_SIGNS = {"greater_than": ">", "greater_than_equal": "≥", "less_than": "<", "less_than_equal": "≤"}
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("model_type", "model_attributes_type"), "a mapping of keys"),
    **{"string_type": "text", "dict_type": "a mapping", "finite_number": "a finite number"},
}


def _explain(error: ValidationError, model: type[BaseModel], name: str, overridden: Sequence[str]) -> str:
    """The first error of the list as one line; the rest are counted."""
    details = error.errors(include_url=False)
    deeper = {tuple(_plain_loc(d)[:-1]) for d in details}
    details = [d for d in details if tuple(_plain_loc(d)) not in deeper] or details  # a mapping is not meant as text
    detail = next((d for d in details if d["type"] == "extra_forbidden"), details[0])
    loc = _plain_loc(detail)
    field = ".".join(str(part) for part in loc) or "(top level)"
    given = any(field == key or field.startswith(key + ".") or key.startswith(field + ".") for key in overridden)
    where = f"{name} (override)" if given else name
    kind, ctx, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "extra_forbidden":
        known = _known_keys(model, loc[:-1])
        close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]!r}?" if close else "known keys: " + ", ".join(sorted(known))
        name, colon, rest = str(loc[-1]).partition(":")
        if colon and name in known:
            hint = f"YAML wants a space after the colon, as in {name}: {rest}"
        message = f"{where}: {field}: unknown key; {hint}"
    elif kind == "missing":
        message = f"{where}: {field}: missing; this key is required"
    elif kind in ("value_error", "assertion_error"):
        message = f"{where}: {field}: {ctx['error']}"
    elif (expected := _expected(kind, ctx, field)) is not None:
        message = f"{where}: {field}: expected {expected}, got {show(value)}"
    else:
        message = f"{where}: {field}: {detail['msg'][:1].lower()}{detail['msg'][1:]}, got {show(value)}"
    more = len({".".join(map(str, d["loc"])) for d in details} - {".".join(map(str, detail["loc"]))})
    return message + (f" (and {more} more)" if more and not _same_union(details, detail) else "")


def _expected(kind: str, ctx: Mapping[str, Any], field: str) -> str | None:
    """What an error of pydantic's ``kind`` expects of a field."""
    if kind == "literal_error":
        return f"one of {ctx['expected']}"
    if kind in _SIGNS:
        return f"a number {_SIGNS[kind]} {next(iter(ctx.values())):g}"
    if kind == "too_short":
        noun = "source" if field in ("data", "sources") else "item"
        return f"at least one {noun}" if ctx["min_length"] == 1 else f"at least {ctx['min_length']} {noun}s"
    if kind == "string_pattern_mismatch":
        return f"text matching {ctx['pattern']}"
    return _EXPECTED.get(kind)


def _same_union(details: list[Any], detail: Any) -> bool:
    """Pydantic reports one error for each branch of a union; that is one mistake."""
    return all(_plain_loc(d) == _plain_loc(detail) for d in details)


def _plain_loc(detail: Any) -> list[int | str]:
    """Where an error is, without the branches of unions."""
    return [part for part in detail["loc"] if not _is_union_tag(part)]


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and (
        part in ("int", "float", "str", "bool", "none") or "[" in part or part[:1].isupper()
    )


def show(value: Any) -> str:
    """A value as JSON, cut to what a line of a message has room for."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_keys(model: type[BaseModel], path: list[int | str]) -> list[str]:
    """Field names at ``path`` below ``model``; follows Optional, list and dict annotations."""
    here: Any = model
    for part in path:
        if isinstance(part, int):
            continue  # an item of a list: its model was found with the list
        if isinstance(here, type) and issubclass(here, BaseModel):
            field = here.model_fields.get(str(part))
            here = field.annotation if field else None
        here = _model_in(here)
        if here is None:
            return []
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, BaseModel) else []


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for arg in get_args(annotation):
        found = _model_in(arg)
        if found is not None:
            return found
    return None


def canonical_json(value: Any) -> str:
    """The canonical JSON of a config or a part of it: sorted keys, no spaces."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """blake2b-128 (hex) of :func:`canonical_json`."""
    return hashlib.blake2b(canonical_json(value).encode(), digest_size=16).hexdigest()


def dump_yaml(config: BaseModel | Mapping[str, Any]) -> str:
    """The resolved config as YAML that :func:`load_config` reads back to the same value."""
    plain = config.model_dump(mode="json") if isinstance(config, BaseModel) else dict(config)
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
