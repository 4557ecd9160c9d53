"""Kinds of numbers in the config."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

__all__ = ["Count", "NonNegative", "Weight"]

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]
