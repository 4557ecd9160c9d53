"""Good pages that do not look like articles: threads, code, verse, recipes, tables, questions, dialogue.

They are written the way such pages are on the web, not the way a filter would like them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from quern.demo.grammar import Voice, keyed, load_stock
from quern.demo.layout import lines, listing, paragraphs, preformatted

__all__ = ["FORMS", "Puzzle", "form", "puzzles"]

MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)


def form(kind: str, seed: int, index: int) -> tuple[str, str]:
    """Title and body (HTML) of page ``index`` of a form."""
    voice = Voice(load_stock("forms"), keyed(seed, kind, index))
    voice.turn = keyed(seed, kind).randrange(1000)
    return FORMS[kind](voice, index)


def _share(voice: Voice, section: str, count: int, index: int) -> list[str]:
    """``count`` frames for page ``index``, said and shuffled; four pages begin a quarter of the section apart.

    Drawn at random, two of four pages would now and then have most of a small section in common.
    """
    frames = voice.stock.sections[section]
    start = voice.turn + index % 4 * len(frames) // 4
    chosen = [frames[(start + n) % len(frames)] for n in range(count)]
    voice.rng.shuffle(chosen)
    return [voice.say(frame) for frame in chosen]


def _pairs(voice: Voice, section: str, count: int, index: int) -> list[tuple[str, str]]:
    halves = (line.partition(" :: ") for line in _share(voice, section, count, index))
    return [(left.strip(), right.strip()) for left, _, right in halves]


def _thread(voice: Voice, index: int) -> tuple[str, str]:
    rows = []
    for title, opening in _pairs(voice, "thread", 9, index):
        replies, day = voice.rng.randint(2, 48), voice.rng.randint(1, 28)
        meta = voice.say(f"started by {{nick}}, {replies} replies, last answer {day} {{month}} by {{nick}}")
        rows.append(
            f'<div class="topic"><h3><a href="/topic/{voice.rng.randint(1000, 9999)}">{escape(title)}</a></h3>\n'
            f"<p>{escape(opening, quote=False)}</p>\n<p>{meta}</p></div>"
        )
    return f"Workshop and garden, page {index + 2}", "\n".join(rows)


def _tutorial(voice: Voice, index: int) -> tuple[str, str]:
    thing = ("word", "name", "place", "colour", "bird")[index // 2 % 5]
    lessons = voice.stock.sections[f"tutorial {index % 2}"]
    # Two pages of one course have the first lesson in common and divide the others.
    others = lessons[1::2] if index // 2 % 2 == 0 else lessons[2::2]
    parts = []
    for lesson in (lessons[0], *others):
        prose, _, code = lesson.partition(" ::")
        parts.append(paragraphs([voice.say(prose.replace("{thing}", thing))]))
        if code.strip():
            parts.append(preformatted(code[1:].replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\")))
    titles = (f"Counting every {thing} in a diary with Python", f"A small database for {thing} observations")
    return titles[index % 2], "\n".join(parts)


def _poem(voice: Voice, index: int) -> tuple[str, str]:
    titles = ("Low water", "What the stairs remember", "Seven windows", "A load of evening", "The other shore")
    stanzas = [[line.strip() for line in stanza.split(" / ")] for stanza in _share(voice, "poem", 6, index)]
    return titles[index % 5], "\n".join(lines([line[:1].upper() + line[1:] for line in stanza]) for stanza in stanzas)


def _lyrics(voice: Voice, index: int) -> tuple[str, str]:
    refrain_text = voice.stock.sections["refrain"][index % 2].split(" / ")
    place = voice.say("{P}")
    titles = ("Pull for the bridge", "Carry the salt")
    body = [
        paragraphs(
            [
                f"The song was taken down in {place} in {voice.rng.randint(1904, 1932)} from a woman who sold eels, "
                "and who claimed to have made up half of it herself while waiting for customers.",
                "It is sung slowly, with a stamp on the last word of every second line, and the whole room joins in "
                "when the refrain comes round. Verses may be left out, but never the one about the gull.",
            ]
        )
    ]
    for verse in _share(voice, "verse", 4, index):
        body.append(lines([line[:1].upper() + line[1:] for line in verse.split(" / ")]))
        body.append(lines([line[:1].upper() + line[1:] for line in refrain_text]))
    body.append(
        paragraphs(
            [
                f"Other versions are known from {voice.say('{Q}')} and from two islands, where the refrain has a "
                "different tune and the mules are donkeys. None of them is older than the railway."
            ]
        )
    )
    return f"{titles[index % 2]}: a song from {place}", "\n".join(body)


def _recipe(voice: Voice, index: int) -> tuple[str, str]:
    voice.fixed["dish"] = voice.stock.words["dish"][index % 4]
    title = voice.say("{veg} {dish} with {grain} and {herb}")
    steps = [voice.say(frame) for frame in voice.stock.sections["step"]]
    body = [
        paragraphs(voice.draw("preface", 4)),
        "<h2>Ingredients</h2>",
        listing(voice.draw("ingredient", 8)),
        "<h2>Method</h2>",
        "<ol>\n" + "\n".join(f"<li>{escape(step, quote=False)}</li>" for step in steps) + "\n</ol>",
    ]
    return title, "\n".join(body)


def _table(voice: Voice, index: int) -> tuple[str, str]:
    places = [voice.say("{Q}") for _ in range(4)]
    year = 2009 + index
    rows = ["<tr><th>Month</th>" + "".join(f"<th>{place}</th>" for place in places) + "</tr>"]
    for month in MONTHS:
        cells = "".join(f"<td>{voice.rng.randint(12, 164)} mm</td>" for _ in places)
        rows.append(f"<tr><td>{month}</td>{cells}</tr>")
    comments = voice.draw("rain")
    body = [
        paragraphs(
            [
                f"The table shows the rain that fell in {year} at four places in the valley, in millimetres a month, "
                "as measured by the schools that keep a gauge. " + comments[0],
                " ".join(comments[1:3]),
            ]
        ),
        "<table>\n" + "\n".join(rows) + "\n</table>",
        paragraphs([" ".join(comments[3:])]),
    ]
    return f"Rainfall in the valley, {year}", "\n".join(body)


def _faq(voice: Voice, index: int) -> tuple[str, str]:
    parts = [
        f"<h2>{escape(question)}</h2>\n{paragraphs([answer])}"
        for question, answer in _pairs(voice, "faq", 8 + index % 2, index)
    ]
    return voice.say("Questions about the allotments at {P}"), "\n".join(parts)


def _glossary(voice: Voice, index: int) -> tuple[str, str]:
    terms = sorted(_pairs(voice, "glossary", 12, index))
    body = "\n".join(f"<dt>{term}</dt>\n<dd>{escape(text[:1].upper() + text[1:])}</dd>" for term, text in terms)
    intro = "The words below turn up in every repair report, and most customers are too polite to ask what they mean."
    return f"Clockmaker's words, part {index + 1}", f"{paragraphs([intro])}\n<dl>\n{body}\n</dl>"


def _dialogue(voice: Voice, index: int) -> tuple[str, str]:
    frames = voice.stock.sections[f"talk {index % 3}"]
    titles = ("The seven o'clock boat", "The bridge they built instead", "A chair for the cat")
    return titles[index % 3], paragraphs([voice.say(frame) for frame in frames])


def _changelog(voice: Voice, index: int) -> tuple[str, str]:
    entries = _share(voice, "change", 15, index)
    parts = [paragraphs(["All notable changes to Tidebook are listed here, the newest release first."])]
    for release in range(4):
        date = f"{voice.rng.randint(1, 28)} {MONTHS[(9 - 2 * release) % 12]} {2019 + index}"
        size = (5, 3, 4, 3)[release]
        parts.append(f"<h2>Version {3 + index}.{9 - release}, {date}</h2>")
        parts.append(listing([entries.pop() for _ in range(size)]))
    return f"Tidebook {3 + index}: release notes", "\n".join(parts)


#: The builder of each form: title and body from a voice and the page's number.
FORMS: dict[str, Callable[[Voice, int], tuple[str, str]]] = {
    "thread_list": _thread,
    "tutorial": _tutorial,
    "poem": _poem,
    "recipe": _recipe,
    "table": _table,
    "faq": _faq,
    "glossary": _glossary,
    "dialogue": _dialogue,
    "changelog": _changelog,
    "lyrics": _lyrics,
}


@dataclass(frozen=True)
class Puzzle:
    """One item of the invented benchmark."""

    id: str
    question: str
    answer: str


def puzzles(seed: int, count: int) -> list[Puzzle]:
    """An invented benchmark of word problems, each with its answer."""
    voice = Voice(load_stock("forms"), keyed(seed, "benchmark"))
    items = []
    for number in range(count):
        a, b, c = voice.rng.randint(12, 48), voice.rng.randint(6, 9), voice.rng.randint(2, 5)
        place = voice.say("{Q}")
        question, answer = (
            (
                f"A baker in {place} fills {a} trays with {b} rolls each and has {a + c} rolls left when the shop "
                "closes at noon. How many rolls did she sell in the morning?",
                a * b - a - c,
            ),
            (
                f"The ferry to {place} takes {a} bicycles on every crossing and crosses {b + c} times on a weekday. On "
                f"Sundays it makes {c} crossings fewer. How many bicycles can it carry on a Sunday?",
                a * b,
            ),
            (
                f"The church clock of {place} loses {b} seconds every hour and is set right at midnight. How many "
                f"seconds is it slow when {a} hours have passed?",
                a * b,
            ),
            (
                f"A library in {place} lends {10 * a} books in the first week of the year and {b} more in each week "
                f"than in the week before. How many books does it lend in week number {c + 1}?",
                10 * a + b * c,
            ),
            (
                f"Along a straight path of {a * b} metres near {place} a post stands every {b} metres, with one at the "
                "very beginning and one at the very end. How many posts are there?",
                a + 1,
            ),
        )[number % 5]
        items.append(Puzzle(f"valley-puzzles/{number:03d}", question, str(answer)))
    return items
