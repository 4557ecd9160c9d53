"""Generates sentences from templates: slots in braces, alternatives in square brackets.

``{P}`` draws a word list, ``{3-9}`` a number, ``[a|b]`` one alternative. Every draw comes from a page's own keyed
generator, so a page is the same whatever other pages are written.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

__all__ = ["Stock", "Voice", "compose", "keyed", "load_stock"]

DATA = Path(__file__).parent / "data"
CHOICE = re.compile(r"\[([^\[\]]+\|[^\[\]]*)\]")
SLOT = re.compile(r"\{(\w+(?:-\d+)?)\}")


@dataclass(frozen=True)
class Stock:
    """One data file: word lists by name (``bread.flour`` for a topic's own) and lines by section."""

    language: str
    words: dict[str, tuple[str, ...]]
    sections: dict[str, tuple[str, ...]]

    @property
    def topics(self) -> tuple[str, ...]:
        """Names of the ``# topic NAME`` sections, in file order."""
        return tuple(name[6:] for name in self.sections if name.startswith("topic "))


@cache
def load_stock(name: str) -> Stock:
    """``data/NAME.txt``: ``# section`` heads lines, ``word = a | b`` inside it defines a word list."""
    words: dict[str, tuple[str, ...]] = {}
    sections: dict[str, list[str]] = {}
    current = ""
    for line in (DATA / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            current = line[2:]
            sections[current] = []
        elif match := re.match(r"(\w+) = (.*)", line):
            scope = current[6:] + "." if current.startswith("topic ") else ""
            words[scope + match[1]] = tuple(part.strip() for part in match[2].split(" | "))
        elif line:
            sections[current].append(line)
    return Stock(name, words, {key: tuple(value) for key, value in sections.items() if key != "words"})


def keyed(*key: object) -> random.Random:
    """A generator that depends on ``key`` alone (seeded by text, hence by SHA-512, never by ``hash``)."""
    return random.Random("/".join(map(str, key)))


@dataclass
class Voice:
    """Who writes one page: the stock, a generator, a topic, and the names that stay the same down the page."""

    stock: Stock
    rng: random.Random
    topic: str = ""
    constant: tuple[str, ...] = ("A", "B", "P", "dish", "grain", "veg", "herb", "offer")
    fixed: dict[str, str] = field(default_factory=dict)
    decks: dict[str, list[str]] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    turn: int = 0
    """Where in a section this site's pages begin to share it out."""

    def say(self, frame: str) -> str:
        """The frame with every slot filled; starts with a capital letter."""
        while match := CHOICE.search(frame):
            frame = frame[: match.start()] + self.rng.choice(match[1].split("|")) + frame[match.end() :]
        text = SLOT.sub(lambda match: self._fill(match[1]), frame)
        return text[:1].upper() + text[1:]

    def draw(self, section: str, count: int | None = None) -> list[str]:
        """``count`` (all, when None) different frames of a section, shuffled and said."""
        frames = list(self.stock.sections[section])
        chosen = self.rng.sample(frames, len(frames) if count is None else min(count, len(frames)))
        return [self.say(frame) for frame in chosen]

    def _fill(self, slot: str) -> str:
        if slot[0].isdigit():
            low, high = slot.split("-")
            return str(self.rng.randint(int(low), int(high)))
        if slot in self.constant:
            if slot not in self.fixed:
                self.fixed[slot] = self._next(slot)
            return self._name(slot)
        if slot == "Q":
            return next(place for place in iter(lambda: self._next("P"), "") if place != self.fixed.get("P"))
        return SLOT.sub(lambda match: self._fill(match[1]), self._next(slot))

    def _next(self, slot: str) -> str:
        """Like a deck of cards: no word comes twice before all have come once."""
        if not self.decks.get(slot):
            words = self.stock.words
            cards = list(words.get(f"{self.topic}.{slot}") or words[slot])
            self.rng.shuffle(cards)
            self.decks[slot] = cards
        return self.decks[slot].pop()

    def _name(self, slot: str) -> str:
        """A person's full name the first time, the first name afterwards."""
        full = self.fixed[slot]
        if slot not in ("A", "B") or slot not in self.named:
            self.named.add(slot)
            return full
        return full.split(" ")[0]


def compose(voice: Voice, num_sentences: int) -> list[str]:
    """Paragraphs of an article on the voice's topic: its own frames among the general ones, none of them twice."""
    stock, rng = voice.stock, voice.rng
    own, general = stock.sections[f"topic {voice.topic}"], stock.sections["generic"]
    num_own = min(len(own), max(num_sentences // 2, num_sentences - len(general)))
    # The first sentence should tell what the page is about.
    opening, *rest = rng.sample(own, num_own) + rng.sample(general, min(len(general), num_sentences - num_own))
    rng.shuffle(rest)
    sentences = [voice.say(frame) for frame in (opening, *rest)]
    paragraphs: list[str] = []
    while sentences:
        room = rng.randint(2, 5 if paragraphs else 4)
        paragraphs.append(" ".join(sentences[:room]))
        sentences = sentences[room:]
    return paragraphs
