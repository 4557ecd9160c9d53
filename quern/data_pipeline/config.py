"""Config sections of a data run that determine which pages are kept and how their text changes."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from quern.config import Section
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.extraction.extract import ExtractConfig
from quern.data_pipeline.sources import SourceConfig
from quern.data_pipeline.stages.language import LanguageConfig
from quern.data_pipeline.stages.pii import PiiConfig
from quern.data_pipeline.stages.quality import QualityConfig
from quern.data_pipeline.stages.toxicity import ToxicityConfig
from quern.data_pipeline.stages.url_filter import UrlConfig

__all__ = ["ChainConfig", "IsolationConfig", "PipelineConfig", "RayConfig"]


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
    sources: Annotated[tuple[SourceConfig, ...], Field(min_length=1)]
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
        return self

    @property
    def chain(self) -> ChainConfig:
        """The part of the config that a worker needs."""
        return ChainConfig(**{name: getattr(self, name) for name in ChainConfig.model_fields})
