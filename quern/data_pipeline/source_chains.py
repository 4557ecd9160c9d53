"""What is done to the pages of each source: its chain, the columns of its verdicts, and the digest of all that decides
its rows."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from quern import storage
from quern.config import canonical_json, digest
from quern.data_pipeline.chain import Chain
from quern.data_pipeline.config import ChainConfig, PipelineConfig
from quern.data_pipeline.sources.plan import NOT_DECIDING

__all__ = ["PAGES_FORMAT", "SourceChain", "build_chains", "named_files", "source_chains"]

#: Raised whenever the code would make other bytes from the same config.
PAGES_FORMAT = 3
#: The same, of runs with a purge list alone. 2: a place counts only where URLs do not tell that it is another page.
_PURGE_RULES = "2"


@dataclass(frozen=True)
class SourceChain:
    """What is done to the pages of one source."""

    config: ChainConfig
    columns: tuple[str, ...] | None
    """The columns of its verdicts, which are those of all sources; None: what its chain measures, as no source of the
    run has a recipe."""
    digest: str
    """Of everything that decides the rows of its partitions, contents of named files included."""


def build_chains(config: PipelineConfig) -> dict[str, tuple[str, ...]]:
    """Build each chain once on the driver, so that missing lists, lexicons and models are found before the run; source
    name → the measures that its chain fills.

    Raises:
        InputError: a named file is missing or not what it should be.
    """
    measures = lru_cache(maxsize=None)(lambda recipe: Chain(ChainConfig.model_validate_json(recipe)).measures)
    return {source.name: measures(canonical_json(config.chain_of(source))) for source in config.sources}


def source_chains(config: PipelineConfig) -> dict[str, SourceChain]:
    """Source name → what is done to its pages.

    Raises:
        InputError: a named file is missing or not what it should be.
    """
    has_recipes = any(source.recipe is not None for source in config.sources)
    measures = build_chains(config) if has_recipes else {}
    # the source with the most of them first: the order of the chain, where one source measures all
    ordered = sorted(measures.items(), key=lambda own: (-len(own[1]), own[0]))
    columns = tuple(dict.fromkeys(name for _, names in ordered for name in names)) or None
    sha256 = lru_cache(maxsize=None)(storage.sha256)
    chains = {}
    for source in config.sources:
        own = config.chain_of(source)
        chain = own.model_dump(mode="json")
        files = {path: sha256(path) for path in sorted(_files_of(chain))}
        if config.purge_list is not None:
            files["rules of purge lists"] = _PURGE_RULES
        plain = source.model_dump(mode="json", exclude={*NOT_DECIDING, "recipe"})
        others = [] if measures.get(source.name) == columns else [columns]
        chains[source.name] = SourceChain(own, columns, digest([PAGES_FORMAT, chain, files, plain, *others]))
    return chains


def _files_of(chain: Mapping[str, Any]) -> set[str]:
    """The files that the config of a chain names. Options of extra rules are any texts: of these, local files alone."""
    extra = chain.get("extra", ())
    options = {text for rule in extra for text in _texts(rule["options"]) if os.path.isfile(text)}
    return options | named_files({name: section for name, section in chain.items() if name != "extra"})


def _texts(tree: Any) -> Iterator[str]:
    """Every text among the values of plain data."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _texts(value)


def named_files(tree: Any) -> set[str]:
    """The files that texts in a config name: lists, lexicons, models, as a path, a glob or a folder."""
    found: set[str] = set()
    for text in (text for text in _texts(tree) if "/" in text or "." in text or "*" in text):
        if storage.is_file(text):
            found.add(text)
        else:
            found.update(storage.glob(text) if glob.has_magic(text) else storage.list_files(text))
    return found
