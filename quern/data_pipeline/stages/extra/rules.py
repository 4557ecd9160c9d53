"""What a rule of one's own is, how a config names it, and the stage that runs it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field

from quern.config import Section, validate
from quern.data_pipeline.page.document import STAGES, Page
from quern.data_pipeline.stages.extra.modules import Sources, find_sources, known_sources, load_module
from quern.errors import InputError, QuernError

__all__ = ["Extra", "ExtraConfig", "Rule", "RuleError", "resolve_rules", "sources_of"]

T = TypeVar("T")

_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")
_RULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
#: Names of the chain's own stages and families of measures, which a rule cannot have.
_TAKEN = {*STAGES, "c4", "duplicates", "fineweb", "gopher", "pre_skip", "repetition", "signature", "text"}


class Rule(Section):
    """A rule at the quality gate. A subclass has its options as fields, and ``columns`` for what it measures.

    It runs behind the chain's own rules, on the text as they left it, in every worker. The answer must depend on the
    page alone. An error that it raises quarantines the page.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    """Names of what it measures: each is a verdict column ``NAME.COLUMN``, null where it was not measured."""

    def measure(self, page: Page) -> Mapping[str, float | None]:
        """Values of ``columns`` for a page, which it must not change; ``page.text`` is the text."""
        raise NotImplementedError

    def decide(self, measures: Mapping[str, float | None]) -> Sequence[str]:
        """The names of what a page with these measures fails, empty where it passes; the first is the reason."""
        return ()


class ExtraConfig(Section):
    """A rule of one's own: a class of a module, with its options."""

    rule: str
    """The module, found in the working folder or on ``PYTHONPATH``, and its class. Example: my_rules:NoPoems"""
    name: str | None = Field(default=None, pattern=f"^{_NAME.pattern}$")
    """Its name in the funnel and of its columns; null = the class's, as ``no_poems``. Example: no_poems"""
    action: Literal["drop", "measure"] = "drop"
    """``measure`` fills the columns and ``failed_rules`` as ``drop`` would; no page fails."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the rule: the fields of its class. Example: {max_short_lines: 0.8}"""
    source_digest: str | None = None
    """Digest of the module's source. It is filled in; if it is given, another source is refused. Example:
    3f0c8a5e6d1b4c7f9a2e8d5b1c6f4a70"""

    @property
    def module(self) -> str:
        """The full name of the module."""
        return self.rule.partition(":")[0]


def resolve_rules(rules: list[str | ExtraConfig]) -> list[str | ExtraConfig]:
    """The rules with their names, all their options and the digests of their sources, once these have been imported.

    Raises:
        ValueError: a module or class is missing or is no rule, an option is wrong, or two rules have one name.
    """
    resolved: list[str | ExtraConfig] = []
    for given in rules:
        config = given if isinstance(given, ExtraConfig) else ExtraConfig(rule=given)
        if not _RULE.fullmatch(config.rule):
            raise ValueError(f"expected MODULE:CLASS, such as my_rules:NoPoems, got {config.rule!r:.100}")
        try:
            sources = _sources(config)
            rule = _load(config, sources)
        except InputError as error:
            raise ValueError(str(error)) from None
        name = config.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(rule).__name__).lower()
        if name in _TAKEN or not _NAME.fullmatch(name):
            raise ValueError(f"{config.rule}: its name {name!r} is taken or too long; give it another with name")
        if any(isinstance(one, ExtraConfig) and one.name == name for one in resolved):
            raise ValueError(f"{config.rule}: two rules have the name {name!r}; give one another with name")
        told = {"name": name, "options": rule.model_dump(mode="json"), "source_digest": sources.digest}
        resolved.append(config.model_copy(update=told))
    return resolved


def sources_of(rules: Sequence[str | ExtraConfig]) -> tuple[Sources, ...]:
    """The sources that a worker needs for resolved rules, each top-level module once."""
    found = {config.module.partition(".")[0]: _sources(config) for config in rules if isinstance(config, ExtraConfig)}
    return tuple(found.values())


def _sources(config: ExtraConfig) -> Sources:
    top = config.module.partition(".")[0]
    sources = known_sources(top)
    if sources is None or sources.digest != config.source_digest:  # what was known may have changed on disk since
        sources = find_sources(top)
    if config.source_digest not in (None, sources.digest):
        raise InputError(
            f"{config.rule}: the source of {top} has changed: expected digest {config.source_digest}, "
            f"got {sources.digest}"
        )
    return sources


def _load(config: ExtraConfig, sources: Sources) -> Rule:
    module, _, name = config.rule.partition(":")
    kind = getattr(load_module(module, sources), name, None)
    if not (isinstance(kind, type) and issubclass(kind, Rule)):
        raise InputError(f"{config.rule}: expected a class {name} in {module} that is a quern.Rule")
    if kind.measure is Rule.measure:
        raise InputError(f"{config.rule}: expected a method measure")
    wrong = [column for column in kind.columns if not _NAME.fullmatch(column)]
    if wrong or isinstance(kind.columns, str) or len(set(kind.columns)) < len(kind.columns):
        raise InputError(
            f"{config.rule}: columns: expected a tuple of different names of small letters, digits and _, "
            f"got {kind.columns!r:.200}"
        )
    return validate(config.options, kind, f"{config.rule}: options")


class RuleError(Exception):
    """A rule of one's own has raised an error, which quarantines the page as ``quarantine.RULE.ERROR``."""

    def __init__(self, rule: str, error: Exception) -> None:
        super().__init__(f"extra rule {rule}: {type(error).__name__}: {error}")
        self.reason = f"{rule}.{type(error).__name__.lower()}"


class Extra:
    """The stage of one rule: it fills the rule's columns, and records what the page fails."""

    def __init__(self, config: ExtraConfig) -> None:
        assert config.name is not None, "rules of a loaded config are resolved"
        self.name = config.name
        self.config = config
        self.rule = _load(config, _sources(config))
        self.measures = tuple(f"{self.name}.{column}" for column in self.rule.columns)

    def __call__(self, page: Page) -> Page:
        text = page.text
        found = self._asked(self.rule.measure, page)
        if page.text != text:
            raise self._wrong("measure: has changed page.text; a rule measures, and changes nothing")
        if not isinstance(found, Mapping):
            raise self._wrong(f"measure: expected a mapping of columns to numbers, got {found!r:.60}")
        for column, value in found.items():
            if column not in self.rule.columns:
                raise self._wrong(f"measured {column!r:.60}, which is none of its columns")
            if value is not None and not (isinstance(value, Real) and abs(value) < math.inf):
                raise self._wrong(f"column {column}: expected a finite number or None, got {value!r:.60}")
            if value is not None:
                page.measures[f"{self.name}.{column}"] = float(value)
        failed = self._asked(self.rule.decide, found)
        if (
            isinstance(failed, str)
            or not isinstance(failed, Iterable)
            or not all(isinstance(one, str) and _NAME.fullmatch(one) for one in failed)
        ):
            raise self._wrong(f"decide: expected names of small letters, digits and _, got {failed!r:.60}")
        for reason in failed:
            if self.config.action == "drop":
                page.fail(self.name, f"{self.name}.{reason}")
            else:
                page.note(f"{self.name}.{reason}")
        return page

    def _asked(self, method: Callable[[Any], T], given: object) -> T:
        try:
            return method(given)
        except Exception as error:
            raise RuleError(self.name, error) from error

    def _wrong(self, what: str) -> QuernError:
        return QuernError(f"extra: {self.config.rule}: {what}")
