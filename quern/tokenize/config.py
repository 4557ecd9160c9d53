"""The root config of a data run: the lowest wing that sees both pages and tokens holds it."""

from __future__ import annotations

from quern.data_pipeline.config import PipelineConfig
from quern.tokenize.encoding import TokenizeConfig, load_encoding

__all__ = ["DataRun", "check"]


class DataRun(PipelineConfig):
    """One YAML of ``quern data run``."""

    tokenize: TokenizeConfig = TokenizeConfig()


def check(config: DataRun) -> None:
    """Find out now what would else stop the run after hours of pages.

    Raises:
        InputError: the encoding cannot be had.
    """
    if not config.tokenize.trains:
        load_encoding(config.tokenize.encoding, config.tokenize.ranks)
