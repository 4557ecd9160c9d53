"""The order of the stages and gates, and nothing else."""

from __future__ import annotations

from time import thread_time
from typing import Protocol

from quern.data_pipeline.config import ChainConfig
from quern.data_pipeline.dedup.signature import Signature
from quern.data_pipeline.extraction.extract import Extract
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.stages.extra.rules import Extra
from quern.data_pipeline.stages.language import Language, LanguageGuess
from quern.data_pipeline.stages.pii import ScrubPii
from quern.data_pipeline.stages.quality import Quality
from quern.data_pipeline.stages.tombstones import Tombstones, TombstonesBySimilarity, TombstonesByText
from quern.data_pipeline.stages.toxicity import Toxicity
from quern.data_pipeline.stages.url_filter import UrlFilter

__all__ = ["Chain", "Gate", "Stage", "chain"]


class Stage(Protocol):
    """Maps a page to a page: it measures, may rewrite the text, and never drops."""

    @property
    def name(self) -> str: ...

    @property
    def measures(self) -> tuple[str, ...]:
        """The verdict columns it fills."""
        ...

    def __call__(self, page: Page) -> Page: ...


Gate = tuple[Stage, ...]
"""Stages that all see a page before it is decided whether it goes on."""


def chain(config: ChainConfig) -> tuple[Gate, ...]:
    """The stages of a page in order, cheapest rejection first. Duplicates come after, over the whole run."""
    return (
        (
            Tombstones(config.purge_list),  # by doc_id and canonical URL; by text hash at the last gate
            UrlFilter(config.urls),
        ),
        (LanguageGuess(config.language),),  # on raw text, before the expensive extraction
        (Extract(config.extract),),
        (Language(config.language),),
        (
            Quality(config.quality),  # measures all families once, then decides
            ScrubPii(config.pii),
            Toxicity(config.toxicity),
            *(Extra(rule) for rule in config.rules),
            TombstonesByText(config.purge_list),
        ),
        (
            Signature(config.duplicates),
            TombstonesBySimilarity(config.purge_list, config.duplicates),
        ),
    )


QUALITY_GATE = 4
"""Index of the gate from which on a page's text is stored: what reaches it can be decided again later."""


class Chain:
    """Runs pages through the stages and gates, and counts each stage's CPU seconds."""

    def __init__(self, config: ChainConfig) -> None:
        self.gates = chain(config)
        self.measures = tuple(name for gate in self.gates for stage in gate for name in stage.measures)
        self.seconds = {stage.name: 0.0 for gate in self.gates for stage in gate}

    def __call__(self, page: Page) -> tuple[Page, int]:
        """The page with its verdict, and the index of the last gate it reached.

        A record that could not be read is dropped at the first gate, after its URL was looked at.
        """
        if page.fault is not None:
            page.fail("read", page.fault)
        clock = thread_time()
        reached = 0
        for reached, gate in enumerate(self.gates):  # noqa: B007 (returned)
            for stage in gate:
                page = stage(page)
                now = thread_time()
                self.seconds[stage.name] += now - clock
                clock = now
            if not page.decide():
                break
        return page, reached
