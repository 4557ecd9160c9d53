"""Good pages that do not look like articles: threads, code, verse, recipes, tables, dialogue.

They are written the way such pages are on the web, not the way a filter would like them.
"""

from __future__ import annotations

from collections.abc import Callable

from quern.demo.grammar import Voice, keyed, load_stock
from quern.demo.layout import elements, lines, paragraphs

__all__ = ["FORMS", "form"]


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


def _thread(voice: Voice, index: int) -> tuple[str, str]:
    rows = []
    for pair in _share(voice, "thread", 9, index):
        title, opening = pair.split(" :: ")
        meta = voice.say("Started by {nick}, {2-48} replies, last answer {1-28} {month} by {nick}")
        rows.append(f'<div class="topic">{elements("h3", [title])}\n{paragraphs(opening, meta)}</div>')
    return f"Workshop and garden, page {index + 2}", "\n".join(rows)


def _tutorial(voice: Voice, index: int) -> tuple[str, str]:
    thing = ("word", "name", "place", "colour", "bird")[index // 2 % 5]
    lessons = voice.stock.sections[f"tutorial {index % 2}"]
    parts = []
    # Two pages of one course have the first lesson in common and divide the others.
    for lesson in (lessons[0], *lessons[1 + index // 2 % 2 :: 2]):
        prose, _, code = lesson.partition(" ::")
        parts.append(paragraphs(voice.say(prose.replace("{thing}", thing))))
        if code.strip():
            code = code[1:].replace("\\\\", "\0").replace("\\n", "\n").replace("\0", "\\")
            parts.append(f"<pre>{elements('code', [code])}</pre>")
    titles = (f"Counting every {thing} in a diary with Python", f"A small database for {thing} observations")
    return titles[index % 2], "\n".join(parts)


def _poem(voice: Voice, index: int) -> tuple[str, str]:
    titles = ("Low water", "What the stairs remember", "Seven windows", "A load of evening", "The other shore")
    stanzas = _share(voice, "poem", 6, index)
    return titles[index % 5], "\n".join(lines(stanza.split(" / ")) for stanza in stanzas)


def _lyrics(voice: Voice, index: int) -> tuple[str, str]:
    refrain = lines(voice.stock.sections["refrain"][index % 2].split(" / "))
    verses = [lines(verse.split(" / ")) + "\n" + refrain for verse in _share(voice, "verse", 4, index)]
    *before, behind = (voice.say(frame) for frame in voice.stock.sections["song"])
    title = voice.say(("Pull for the bridge", "Carry the salt")[index % 2] + ": a song from {P}")
    return title, "\n".join([paragraphs(*before), *verses, paragraphs(behind)])


def _recipe(voice: Voice, index: int) -> tuple[str, str]:
    voice.fixed["dish"] = voice.stock.words["dish"][index % 4]
    body = [
        paragraphs(*voice.draw("preface", 4)),
        "<h2>Ingredients</h2>",
        f"<ul>\n{elements('li', voice.draw('ingredient', 8))}\n</ul>",
        "<h2>Method</h2>",
        f"<ol>\n{elements('li', [voice.say(frame) for frame in voice.stock.sections['step']])}\n</ol>",
    ]
    return voice.say("{veg} {dish} with {grain} and {herb}"), "\n".join(body)


def _table(voice: Voice, index: int) -> tuple[str, str]:
    year, rows = 2009 + index, [elements("th", ["Month", *(voice.say("{Q}") for _ in range(4))])]
    rows += [
        elements("td", [month, *(voice.say("{12-164} mm") for _ in range(4))]) for month in voice.stock.words["months"]
    ]
    table = "<table>\n" + "\n".join(f"<tr>{row}</tr>" for row in rows) + "\n</table>"
    about = f"The table shows the rain that fell in {year} at four places in the valley, in millimetres a month, as "
    first, *rest = voice.draw("rain")
    before = paragraphs(about + f"measured by the schools that keep a gauge. {first}", " ".join(rest[:2]))
    return f"Rainfall in the valley, {year}", "\n".join([before, table, paragraphs(" ".join(rest[2:]))])


def _glossary(voice: Voice, index: int) -> tuple[str, str]:
    terms = [line.split(" :: ") for line in sorted(_share(voice, "glossary", 12, index))]
    body = "\n".join(
        elements("dt", [term]) + "\n" + elements("dd", [text[:1].upper() + text[1:]]) for term, text in terms
    )
    intro = "The words below turn up in every repair report, and most customers are too polite to ask what they mean."
    return f"Clockmaker's words, part {index + 1}", f"{paragraphs(intro)}\n<dl>\n{body}\n</dl>"


def _dialogue(voice: Voice, index: int) -> tuple[str, str]:
    titles = ("The seven o'clock boat", "The bridge they built instead", "A chair for the cat")
    return titles[index % 3], paragraphs(*map(voice.say, voice.stock.sections[f"talk {index % 3}"]))


#: The builder of each form: title and body from a voice and the page's number.
FORMS: dict[str, Callable[[Voice, int], tuple[str, str]]] = {
    "thread_list": _thread,
    "tutorial": _tutorial,
    "poem": _poem,
    "recipe": _recipe,
    "table": _table,
    "glossary": _glossary,
    "dialogue": _dialogue,
    "lyrics": _lyrics,
}
