"""Config sections of a data run that determine which pages are kept and how their text changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from quern.config import Section, read_yaml, validate
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.extraction.extract import ExtractConfig
from quern.data_pipeline.sources import SourceConfig
from quern.data_pipeline.stages.extra.rules import ExtraConfig, resolve_rules
from quern.data_pipeline.stages.language import LanguageConfig
from quern.data_pipeline.stages.pii import PiiConfig
from quern.data_pipeline.stages.quality import QualityConfig
from quern.data_pipeline.stages.toxicity import ToxicityConfig
from quern.data_pipeline.stages.url_filter import UrlConfig
from quern.errors import InputError

__all__ = ["RECIPE_SECTIONS", "ChainConfig", "IsolationConfig", "PipelineConfig", "RayConfig", "SourceWithRecipe"]

log = logging.getLogger(__name__)


class ChainConfig(Section):
    """Config of everything that the chain does to a page."""

    purge_list: str | None = None
    """A folder of tombstones: purged documents that a run must not read again (docs/purge.md). Example: purged/"""
    urls: UrlConfig = UrlConfig()
    language: LanguageConfig = LanguageConfig()
    extract: ExtractConfig = ExtractConfig()
    quality: QualityConfig = QualityConfig()
    pii: PiiConfig = PiiConfig()
    toxicity: ToxicityConfig = ToxicityConfig()
    duplicates: DuplicatesConfig = DuplicatesConfig()
    later: ClassVar[Mapping[str, Any]] = {"extra": []}
    extra: Annotated[list[str | ExtraConfig], AfterValidator(resolve_rules)] = Field(default_factory=list)
    """Rules of one's own at the quality gate, behind quern's: classes of your own modules (docs/data-run.md). Example:
    [my_rules:NoPoems]"""

    @property
    def rules(self) -> list[ExtraConfig]:
        """The rules of ``extra``, resolved."""
        return [rule for rule in self.extra if isinstance(rule, ExtraConfig)]


class RayConfig(Section):
    """Where the work runs: ``address`` of a cluster, or null for a Ray started for this run on this machine."""

    address: str | None = None
    """A Ray cluster, ``auto`` or host:port; null = a Ray started for this run on this machine. Example: auto"""


class IsolationConfig(Section):
    """Limits of one page, beyond which its worker is killed and the page quarantined."""

    page_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """[CPU seconds] Time limit of one page; by the wall clock it is ten times as long. A page that exceeds it is
    quarantined."""
    worker_memory_mib: Annotated[int, Field(ge=512)] = 6144
    """[MiB] Private memory of a worker, its programs and models included. A page on which a worker exceeds it twice is
    quarantined."""


#: Sections of which a source may have its own; the other keys of a config hold for the run, duplicates among them.
RECIPE_SECTIONS = ("urls", "extract", "language", "quality", "pii", "toxicity", "extra")
_OF_THE_RUN = ("run_dir", "seed", "workers", "ray", "isolation", "sources", "purge_list", "duplicates", "tokenize")
#: Of these, what would change a source's documents or tokens.
_DECIDING = ("purge_list", "duplicates", "tokenize")


class SourceWithRecipe(SourceConfig):
    """One item of ``sources``: what to read, how its pages are named, and by which rules they are judged."""

    later: ClassVar[Mapping[str, Any]] = {**SourceConfig.later, "recipe": None, "near_duplicates": True}
    recipe: str | dict[str, Any] | None = None
    """Rules of this source alone: a config file, or a mapping. Each of the sections ``urls``, ``extract``,
    ``language``, ``quality``, ``pii``, ``toxicity`` and ``extra`` that it has holds in place of the run's own, whole;
    its other sections are left out. Example: configs/code.yaml"""
    near_duplicates: bool = True
    """Compare documents of this source with others by similarity; false = only by equal text and equal URL, as for
    code, where similar files are wanted."""

    @field_validator("recipe")
    @classmethod
    def _resolved(cls, recipe: str | dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        """The sections with all their keys, so that the run's record does not depend on a file."""
        if recipe is None:
            return None
        named = f"{recipe}: " if isinstance(recipe, str) else ""
        try:
            raw = read_yaml(recipe) if isinstance(recipe, str) else recipe
            left_out = [key for key in raw if key in _OF_THE_RUN]
            if decide := [key for key in left_out if key in _DECIDING]:
                log.warning(
                    "source %s: recipe: %s%s: not taken; what the run's own config says holds for all sources",
                    info.data.get("name"), named, ", ".join(decide),
                )  # fmt: skip
            own = validate({key: raw[key] for key in raw if key not in left_out}, ChainConfig, named.rstrip(": "))
        except InputError as error:
            raise ValueError(str(error).removeprefix(": ")) from None
        plain = own.model_dump(mode="json")
        return {name: plain.get(name, []) for name in RECIPE_SECTIONS if name in own.model_fields_set} or None


class PipelineConfig(ChainConfig):
    """Config of a data run up to its unique documents."""

    run_dir: str
    """The folder of the run, here or on a store (``s3://bucket/run``). Example: runs/first"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the order of documents and of the held-out share."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """[processes] Worker processes; null = one per CPU of the machine or cluster. Example: 8"""
    ray: RayConfig = RayConfig()
    isolation: IsolationConfig = IsolationConfig()
    sources: Annotated[tuple[SourceWithRecipe, ...], Field(min_length=1)]
    """What is read, one entry per source. Example: [{name: web, kind: warc, paths: 'crawl/*.warc.gz'}]"""

    @field_validator("run_dir")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("expected a folder for the run, got an empty text")
        return value.rstrip("/") or "/"

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [source.name for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"sources: expected different names, got {name!r} twice")
        for number, source in enumerate(self.sources):
            if not source.near_duplicates and self.duplicates.url_threshold > 0:
                raise ValueError(
                    f"sources.{number}.near_duplicates: expected true with duplicates.url_threshold above 0"
                )
        classes: dict[str | None, str] = {}
        for rule in (rule for source in self.sources for rule in self.chain_of(source).rules):
            if classes.setdefault(rule.name, rule.rule) != rule.rule:
                raise ValueError(
                    f"extra: the name {rule.name!r} is of {classes[rule.name]} and of {rule.rule}, and columns have "
                    f"the name of their rule; give one another with name"
                )
        return self

    def chain_of(self, source: SourceWithRecipe) -> ChainConfig:
        """What the chain does to the pages of a source: its own sections, and the run's for the rest."""
        named = source.recipe if isinstance(source.recipe, dict) else {}
        own = validate(named, ChainConfig, f"source {source.name}: recipe")
        parts = {name: getattr(own if name in named else self, name) for name in ChainConfig.model_fields}
        if not source.near_duplicates:  # a document without a signature is compared as one that is too short for one
            parts["duplicates"] = self.duplicates.model_copy(update={"near": False, "url_threshold": 0.0})
        return ChainConfig(**parts)

    @property
    def rule_names(self) -> tuple[str, ...]:
        """The names of the extra rules of all sources, sorted."""
        return tuple(sorted({str(rule.name) for source in self.sources for rule in self.chain_of(source).rules}))
