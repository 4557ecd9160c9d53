"""Measures toxic and obscene pages: density of a lexicon's terms, and a classifier's score."""

from __future__ import annotations

import os
import re
import unicodedata
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from itertools import chain
from typing import Annotated, Any, Literal

import fasttext
import regex
from pydantic import Field, field_validator, model_validator

from quern import storage
from quern.config import Section
from quern.data_pipeline.page.document import Page
from quern.data_pipeline.page.memo import Memo
from quern.data_pipeline.stages.quality.words import UNSPACED_LANGUAGES
from quern.errors import InputError

__all__ = ["Lexicon", "Toxicity", "ToxicityConfig", "read_lexicon"]

_WORD = regex.compile(r"[\p{L}\p{M}\p{N}]++(?:['’][\p{L}\p{M}\p{N}]++)*+")
#: The half-width voicing marks are letters that normalisation makes marks of.
_MARKS = regex.compile(r"[\p{M}\uff9e\uff9f]{30}(?=[\p{M}\uff9e\uff9f])")
_BETWEEN_WORDS = re.compile(r"[\s\-‐‑.,'’]*")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LABEL = re.compile(r"[a-z0-9_]+")


class ToxicityConfig(Section):
    """Config of toxicity: how it is measured, and the thresholds."""

    action: Literal["drop", "measure"] = "drop"
    """``measure`` fills the columns and lets every page pass."""
    embedded: bool = True
    """Use quern's own short list of obscene English terms where no other lexicon is given for ``en``."""
    lexicons: dict[str, str] = Field(default_factory=dict)
    """A file of one term per line, by language code. Example: {de: lists/de.txt}"""
    lexicon_folder: str | None = None
    """A folder with one such file per language, named by its code (LDNOOBW's layout); ``lexicons`` has precedence.
    Example: lists/ldnoobw"""
    max_density: Annotated[float, Field(ge=0, le=1)] = 0.02
    """[share] A page fails when more than this share of its words are terms of the lexicon (characters in languages
    without spaces), and there are ``min_hits``."""
    min_hits: Annotated[int, Field(ge=1)] = 3
    """[terms] Fewest terms of the lexicon in a page that fails."""
    classifier: str | None = None
    """A fastText model file, for example one of Dolma's Jigsaw classifiers. Example: models/jigsaw.bin"""
    labels: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(default_factory=dict)
    """The model's labels to measure, without ``__label__``, and the probability above which each fails (1: never).
    Example: {toxic: 0.9}"""

    @field_validator("labels")
    @classmethod
    def _plain_labels(cls, labels: dict[str, float]) -> dict[str, float]:
        for label in labels:
            if not _LABEL.fullmatch(label) or label.startswith("lexicon_"):
                raise ValueError(f"expected labels of a-z, 0-9 and _, not beginning with lexicon_, got {label!r}")
        return labels

    @model_validator(mode="after")
    def _classifier_has_labels(self) -> ToxicityConfig:
        if (self.classifier is None) != (not self.labels):
            raise ValueError("expected `classifier` and `labels` together, got one of them")
        return self


def _fold(text: str) -> str:
    """Without case, and with full-width and decomposed letters as plain ones.

    Normalisation sorts marks that stand in a row, in time that grows with the square of their number; so rows are cut
    at 30 marks by a joiner that is a mark itself (Unicode Standard Annex 15, section 13, stream-safe text).
    """
    if not text.isascii():
        text = _MARKS.sub("\\g<0>\u034f", text)
    return unicodedata.normalize("NFKC", text).casefold()


_WORDS: Memo[str, tuple[str, ...]] = Memo(lambda chunk: tuple(_WORD.findall(chunk)), 1 << 17, 40)
"""What stands between white space → its words; no word reaches across it, so each is looked at once."""


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Terms to look for, as the text is seen: NFKC, casefolded, words joined by one space."""

    terms: frozenset[str]
    longest: dict[str, int]
    """By a term's first word (first character without spaces): the most words (characters) such a term has."""
    spaceless: bool

    def count(self, text: str) -> tuple[int, int]:
        """(hits, words or characters of the text); hits do not overlap, the longest term at a place counts."""
        folded = _fold(text)
        units: Any = folded if self.spaceless else list(chain.from_iterable(map(_WORDS.__getitem__, folded.split())))
        glue = "" if self.spaceless else " "
        count = sum(not c.isspace() for c in units) if self.spaceless else len(units)
        hits = free = 0
        longest = self.longest
        for at in [place for place, unit in enumerate(units) if unit in longest]:
            if at < free:
                continue
            for size in range(longest[units[at]], 0, -1):
                if at + size <= len(units) and glue.join(units[at : at + size]) in self.terms:
                    hits, free = hits + 1, at + size
                    break
        return hits, count


class Toxicity:
    """Stage: measures ``toxicity.lexicon_hits``, ``toxicity.lexicon_density`` and one probability a configured label.

    A page in a language without a lexicon has no lexicon measures. Rules: ``toxicity.lexicon_density`` and
    ``toxicity.<label>``.

    Raises:
        InputError: a lexicon or the model is missing or unreadable, or the model lacks a label.
    """

    name = "toxicity"

    def __init__(self, config: ToxicityConfig) -> None:
        self.config = config
        self._lexicons = _load_lexicons(config)
        lexicon = ("toxicity.lexicon_hits", "toxicity.lexicon_density") if self._lexicons else ()
        self.measures = lexicon + tuple(f"toxicity.{label}" for label in config.labels)
        if config.classifier is not None and not os.path.isfile(config.classifier):
            raise InputError(f"toxicity.classifier: {config.classifier}: no such file")
        if config.classifier is not None:
            _model(config.classifier, tuple(config.labels))  # now, not on the first page: what is wrong is the config

    def __call__(self, page: Page) -> Page:
        if page.text is None:
            return page
        config = self.config
        lexicon = self._lexicons.get((page.language or "").split("-")[0])
        if lexicon is not None:
            hits, units = lexicon.count(page.text)
            density = hits / units if units else 0.0
            page.measures["toxicity.lexicon_hits"] = float(hits)
            page.measures["toxicity.lexicon_density"] = density
            if config.action == "drop" and hits >= config.min_hits and density > config.max_density:
                page.fail("toxicity", "toxicity.lexicon_density")
        if config.classifier is not None:
            for label, probability in _classify(config.classifier, tuple(config.labels), page.text).items():
                page.measures[f"toxicity.{label}"] = probability
                if config.action == "drop" and probability > config.labels[label]:
                    page.fail("toxicity", f"toxicity.{label}")
        return page


def _load_lexicons(config: ToxicityConfig) -> dict[str, Lexicon]:
    paths: dict[str, str] = {}
    if config.lexicon_folder is not None:
        files = storage.list_files(config.lexicon_folder)
        paths = {name: file for file in files if re.fullmatch("[a-z]{2,3}", name := file.rpartition("/")[2])}
        if not paths:
            raise InputError(
                f"toxicity.lexicon_folder: {config.lexicon_folder}: expected files named by language codes such as en"
            )
    paths |= config.lexicons
    lexicons = {language: read_lexicon(path, language) for language, path in paths.items()}
    if config.embedded and "en" not in lexicons:
        own = resources.files("quern.data_pipeline").joinpath("data/obscene_en.txt").read_text("utf-8")
        lexicons["en"] = _make_lexicon(own, "en")
    return lexicons


def read_lexicon(path: str, language: str) -> Lexicon:
    """The lexicon in a file of one term a line (``#`` begins a comment line).

    A term that is more than its words (``a$$``, an emoji) cannot be told from its words in a text, and one of a single
    letter would hit everywhere: such terms are left out.

    Raises:
        InputError: the file is missing, not UTF-8, or has no usable term.
    """
    try:
        text = storage.read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the lexicon for {language!r} cannot be read ({error})") from None
    lexicon = _make_lexicon(text, language)
    if not lexicon.terms:
        raise InputError(f"{path}: expected one term a line, found none")
    return lexicon


def _make_lexicon(text: str, language: str) -> Lexicon:
    spaceless = language in UNSPACED_LANGUAGES  # a term is any stretch of characters, and density is hits a character
    terms = set()
    longest: dict[str, int] = {}
    for line in text.splitlines():
        line = _fold(line.strip())
        if not line or line.startswith("#"):
            continue
        words = [line] if spaceless else _WORD.findall(line)
        if not spaceless and (_BETWEEN_WORDS.sub("", line) != _BETWEEN_WORDS.sub("", "".join(words))):
            continue
        if len(line) < 2:
            continue
        terms.add(" ".join(words))
        first, size = (line[0], len(line)) if spaceless else (words[0], len(words))
        longest[first] = max(longest.get(first, 0), size)
    return Lexicon(frozenset(terms), longest, spaceless)


@lru_cache(maxsize=4)
def _model(path: str, labels: tuple[str, ...]) -> Any:
    """The model, loaded once a process; it knows every one of ``labels``."""
    try:
        model = fasttext.load_model(path)
        known = _probabilities(model, "probe")
    except (ValueError, RuntimeError, OSError) as error:
        raise InputError(f"toxicity.classifier: {path}: not a fastText classifier ({error})") from None
    for label in labels:
        if label not in known:
            some = ", ".join(sorted(known)[:20])
            raise InputError(f"toxicity.labels: {path} has no label {label!r}, only {some}")
    return model


def _probabilities(model: Any, text: str) -> dict[str, float]:
    # a threshold below zero keeps labels of probability 0 too
    labels, values = model.predict(text, k=-1, threshold=-1.0)
    return {label.removeprefix("__label__"): min(float(p), 1.0) for label, p in zip(labels, values, strict=True)}


def _classify(path: str, labels: tuple[str, ...], text: str) -> dict[str, float]:
    """The probability of each label for the text as one line; 0 for one the model does not answer with."""
    line = _SURROGATE.sub("\ufffd", text).replace("\n", " ")
    found = _probabilities(_model(path, labels), line)
    return {label: found.get(label, 0.0) for label in labels}
