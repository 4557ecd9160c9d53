"""The config of a data run."""

from __future__ import annotations

from quern.data_pipeline.config import PipelineConfig
from quern.tokenize.encoding import TokenizeConfig

__all__ = ["DataRun"]


class DataRun(PipelineConfig):
    """The config of ``quern data run``."""

    tokenize: TokenizeConfig = TokenizeConfig()
