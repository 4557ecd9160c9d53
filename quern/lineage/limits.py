"""The range in which each measurement passes, by the run's recorded config, without importing the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Limit", "config_of", "limits", "rules_of"]


@dataclass(frozen=True)
class Limit:
    """The bounds of a measurement: below ``least`` or above ``most`` it fails; None: no bound."""

    least: float | None = None
    most: float | None = None


#: Measurement → (least, most): keys of the section that is named like the measurement's family.
_QUALITY = {
    "gopher.num_words": ("min_words", "max_words"),
    "gopher.mean_word_length": ("min_mean_word_length", "max_mean_word_length"),
    "gopher.hash_ratio": (None, "max_hash_ratio"),
    "gopher.ellipsis_ratio": (None, "max_ellipsis_ratio"),
    "gopher.bullet_line_frac": (None, "max_bullet_line_frac"),
    "gopher.ellipsis_line_frac": (None, "max_ellipsis_line_frac"),
    "gopher.alpha_word_frac": ("min_alpha_word_frac", None),
    "gopher.num_stop_words": ("min_stop_words", None),
    "c4.num_sentences": ("min_sentences", None),
    "fineweb.line_punct_ratio": ("line_punct_ratio", None),
    "fineweb.short_line_ratio": (None, "short_line_ratio"),
    "fineweb.char_dup_ratio": (None, "char_dup_ratio"),
    "fineweb.list_ratio": (None, "list_ratio"),
}
#: Measurements that fail above 0, and the switch of that rule; None: it has none.
_ZERO = {
    "repetition.empty": None,
    "fineweb.empty": None,
    "c4.lorem_ipsum": "lorem_ipsum",
    "c4.curly_bracket": "curly_bracket",
}


def config_of(record: Any, source: str | None = None) -> dict[str, Any]:
    """The resolved config in a data run's record, empty where it has none; of a ``source`` with a recipe with the
    sections of the recipe."""
    config = _section(record, "config") if isinstance(record, dict) else {}
    sources = config.get("sources")
    for own in sources if isinstance(sources, list) else ():
        if isinstance(own, dict) and own.get("name") == source and isinstance(own.get("recipe"), dict):
            return {**config, **own["recipe"]}
    return {**config}


def rules_of(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The rules of one's own in a config, by name: class and options."""
    rules = config.get("extra")
    return {
        str(rule.get("name")): {"rule": rule.get("rule"), "options": rule.get("options")}
        for rule in (rules if isinstance(rules, list) else ())
        if isinstance(rule, dict)
    }


def limits(config: Mapping[str, Any]) -> dict[str, Limit]:
    """The limits of a data run's resolved config, by measurement; a rule that is off, or only measures, has none.

    A measurement at a limit passes; ``toxicity.lexicon_density`` fails only together with enough hits. A config of
    another version of quern may say less, and gives fewer.
    """
    found = {"language.guess_score": Limit(least=_number(_section(config, "language").get("pre_skip")))}
    found |= _quality(_section(config, "quality"))
    toxicity = _section(config, "toxicity")
    if toxicity.get("action") == "drop":
        found["toxicity.lexicon_density"] = Limit(most=_number(toxicity.get("max_density")))
        for label, most in _section(toxicity, "labels").items():
            found[f"toxicity.{label}"] = Limit(most=_number(most))
    urls = _section(config, "urls")
    if urls.get("action") == "drop":
        found |= {"url.blocked_domain": Limit(most=0), "url.blocked_url": Limit(most=0)}
        found["url.banned_words"] = Limit(most=_number(urls.get("max_words")))
        found["url.soft_words"] = Limit(most=_number(urls.get("max_soft_words")))
    return {name: limit for name, limit in found.items() if limit != Limit()}


def _quality(quality: Mapping[str, Any]) -> dict[str, Limit]:
    order = quality.get("order")
    if quality.get("action") != "drop" or not isinstance(order, list):
        return {}
    found = {}
    for name, (least, most) in _QUALITY.items():
        family = _section(quality, name.partition(".")[0])
        found[name] = Limit(*(None if key is None else _number(family.get(key)) for key in (least, most)))
    for rule, value in _section(quality, "repetition").items():
        found[f"repetition.{rule}"] = Limit(most=_number(value))
    for name, switch in _ZERO.items():
        if switch is None or _section(quality, name.partition(".")[0]).get(switch) is True:
            found[name] = Limit(most=0)
    return {name: limit for name, limit in found.items() if name.partition(".")[0] in order}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
