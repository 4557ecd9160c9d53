"""Config of duplicate removal, and the recall that it implies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from quern.config import Section

__all__ = ["UNLIKE", "URL_BINS", "DuplicatesConfig", "recall", "recall_curve"]

#: Of documents with one URL: a Jaccard similarity below this says that it serves different texts.
UNLIKE = 0.2
#: Removed URL duplicates are counted by their similarity in [0, 0.2), [0.2, 0.5), [0.5, 0.8), [0.8, 1].
URL_BINS = (UNLIKE, 0.5, 0.8)


class DuplicatesConfig(Section):
    """Which copies are removed: equal text, equal URL, or word shingles with a Jaccard similarity ≥ ``threshold``.

    Bands only propose pairs; every near duplicate is verified on its shingles. ``bands`` and ``rows`` are never
    derived from ``threshold``: a library's "optimal" choice at 0.8 (9 bands of 13 rows) misses 60 % of the pairs at
    exactly 0.8, the default here 5 %.
    """

    exact: bool = True
    """Remove documents whose final text is equal."""
    url: bool = True
    """Remove documents whose canonical URL is equal."""
    url_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    """[Jaccard similarity] Remove a document with the URL of another one only if their shingle sets are at least this
    similar; 0 removes it whatever its text. Above 0, two texts that are too short for a shingle both stay."""
    near: bool = True
    """Remove documents that are similar to one that is kept."""
    ngram: Annotated[int, Field(ge=1, le=64)] = 5
    """[words] Words in a shingle; a text with fewer words is only compared as a whole."""
    num_perm: Annotated[int, Field(ge=1, le=4096)] = 128
    """[values] Values in a MinHash signature."""
    bands: Annotated[int, Field(ge=1, le=255)] = 16
    """[bands] Bands of a signature; ``bands`` × ``rows`` is at most ``num_perm``."""
    rows: Annotated[int, Field(ge=1)] = 8
    """[values] Signature values in a band: two documents are compared when all rows of at least one band agree."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.8
    """[Jaccard similarity] Two documents whose shingle sets are at least this similar are near duplicates."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Seed of the permutations, as in ``datasketch.MinHash(seed=…)``."""
    scope: Literal["run", "source"] = "run"
    """Compare the documents of the whole run, or only those of one source with each other."""
    url_keep: Literal["best", "latest"] = "best"
    """Of documents with the same URL keep the first in survivor order, or the one fetched last."""
    max_band_members: Annotated[int, Field(ge=1, le=65536)] = 32
    """[documents] Where more documents share a band, each is compared only with the first of them in survivor order."""
    alarm_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """[share] A source that loses more than this share of its documents is reported."""

    later: ClassVar[Mapping[str, Any]] = {"url_threshold": 0.0}

    @model_validator(mode="after")
    def _bands_fit(self) -> Self:
        if self.url_threshold > 0 and not (self.url and self.near):
            raise ValueError("url_threshold: expected only with url and near, whose shingles are compared")
        if self.bands * self.rows > self.num_perm:
            raise ValueError(
                f"expected bands × rows ≤ num_perm ({self.num_perm}), got {self.bands} × {self.rows} = "
                f"{self.bands * self.rows}"
            )
        return self


def recall(similarity: float, bands: int, rows: int) -> float:
    """The share of pairs of this Jaccard similarity that at least one band proposes: ``1 − (1 − s^r)^b``.

    Leskovec, Rajaraman, Ullman, *Mining of Massive Datasets*, §3.4.2.
    """
    return float(1.0 - (1.0 - similarity**rows) ** bands)


def recall_curve(config: DuplicatesConfig) -> tuple[tuple[float, float], ...]:
    """``(similarity, recall)`` for similarities 0.50, 0.55 … 1.00 under the bands of ``config``."""
    return tuple((step / 20, recall(step / 20, config.bands, config.rows)) for step in range(10, 21))
