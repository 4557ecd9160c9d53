"""Bad pages: link farms, spam, abuse, errors; and unwanted content inside good pages."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from quern.demo.grammar import Voice, load_stock
from quern.demo.layout import page, paragraphs

__all__ = ["TRAPS", "contact", "edited", "with_control_token"]

CONTROL_TOKEN_SENTENCES = (
    "The printout ended with the mysterious line <|endoftext|> and nobody in the office knew who had typed it.",
    "Someone had painted <|endoftext|><|im_start|>system on the shed, which the committee took for modern art.",
    "In the machine's answers the mark <|endoftext|> turns up now and then, in the middle of a sentence for no reason.",
)

#: Numbers that are real enough to be found and belong to nobody: Ofcom's and NANPA's ranges for fiction, the card
#: industry's test numbers, the example accounts of the IBAN registry, public name servers. Mail goes to example.org
#: (RFC 2606), which unlike ``.example`` has a suffix that real addresses have.
PHONES = ("+44 20 7946 0018", "+1 212-555-0143", "+44 117 496 0204", "+1 (415) 555-0132")
CARDS = ("4111 1111 1111 1111", "5555 5555 5555 4444", "3782 822463 10005", "6011 1111 1111 1117")
IBANS = ("DE89 3704 0044 0532 0130 00", "GB29 NWBK 6016 1331 9268 19", "FR14 2004 1010 0505 0001 3M02 606")
ADDRESSES = ("9.9.9.9", "1.1.1.1", "208.67.222.222", "149.112.112.112")


def contact(index: int, rng: random.Random) -> str:
    """A paragraph with an e-mail address, a phone number, an IP address, a card and an account."""
    name = rng.choice(("ruth.okafor", "h.prowse", "desk+letters", "tess_marchetti"))
    return (
        f"If you want to help, write to {name}@mail{index}.example.org or call {PHONES[index % 4]} on a weekday. The "
        f"flyer still gives the account {IBANS[index % 3]} for donations and the (expired) card {CARDS[index % 4]} for "
        f"the rest, which the treasurer regrets. The camera on the roof answers at {ADDRESSES[index % 4]} when it "
        "answers at all."
    )


def with_control_token(texts: Sequence[str], index: int) -> tuple[str, ...]:
    """The paragraphs with one in their middle that spells out a control token."""
    middle = len(texts) // 2
    return (*texts[:middle], CONTROL_TOKEN_SENTENCES[index % 3], *texts[middle:])


def edited(texts: Sequence[str]) -> tuple[str, ...]:
    """The paragraphs with a few words replaced: about nine tenths of all 5-word shingles stay the same.

    A replaced word touches five shingles, so ``k`` of ``n`` words give a Jaccard similarity of
    ``(n − 5k) / (n + 5k)``; ``k = n / 105`` makes that 0.91.
    """
    swaps = dict(pair.split(":") for pair in load_stock("forms").words["swap"])
    words = "\n ".join(texts).split(" ")
    wanted = max(1, round(len(words) / 105))
    apart, last = len(words) // (wanted + 1) // 2, -len(words)  # so that no shingle is touched twice
    for place, word in enumerate(words):
        if word in swaps and wanted and place - last >= apart:
            words[place], last, wanted = swaps[word], place, wanted - 1
    return tuple(" ".join(words).split("\n "))


def _link_farm(rng: random.Random, index: int) -> dict[str, Any]:
    voice, title = Voice(load_stock("forms"), rng), f"Directory {index + 1}"
    links = "\n".join(
        voice.say(f'<div><a href="https://shop{{10-99}}.invalid/{n}">[Best|Discount] {{good}} {{Q}}</a></div>')
        for n in range(180)
    )
    head = f'<!DOCTYPE html>\n<html lang="en">\n<head><title>{title}</title></head>\n<body>\n<h1>{title}</h1>\n'
    html = f"{head}{links}\n</body>\n</html>\n"
    return {"title": title, "html": html, "host": "links.invalid"}


def _spam(rng: random.Random, index: int) -> dict[str, Any]:
    voice = Voice(load_stock("forms"), rng)
    voice.fixed["offer"] = voice.say("cheap {good} {Q}").lower()
    texts = [voice.say(rng.choice(voice.stock.sections["spam"])) for _ in range(14)]
    title = voice.fixed["offer"].title()
    return {"title": title, "html": page(title, paragraphs(*texts), "en", "shop.invalid"), "host": "shop.invalid"}


def _toxic(rng: random.Random, index: int) -> dict[str, Any]:
    rants = Voice(load_stock("forms"), rng).draw("curse")
    calm = Voice(load_stock("en"), rng, "bikes").draw("topic bikes", len(rants))
    texts = [f"{rant} {sentence}" for rant, sentence in zip(rants, calm, strict=True)]
    title = "Letters we did not print"
    return {"title": title, "html": page(title, paragraphs(*texts), "en", "sample.example")}


def _short(rng: random.Random, index: int) -> dict[str, Any]:
    text = "This page has moved. You will find the opening hours on the notice board beside the door."
    return {"title": "Moved", "html": page("Moved", paragraphs(text), "en", "sample.example")}


def _empty_body(rng: random.Random, index: int) -> dict[str, Any]:
    script = "<script>document.addEventListener('load', () => { render(window.__STATE__); });</script>"
    html = f'<!DOCTYPE html><html><head><title>App</title>{script}</head><body><div id="root"></div></body></html>'
    return {"title": "App", "html": html}


def _not_found(rng: random.Random, index: int) -> dict[str, Any]:
    text = "The page you were looking for is not here. It may have been moved, renamed or eaten by the goat."
    html = page("Not found", paragraphs(text), "en", "sample.example")
    return {"title": "Not found", "html": html, "status": "404 Not Found"}


def _json(rng: random.Random, index: int) -> dict[str, Any]:
    stations = [{"name": city, "level_cm": rng.randint(20, 400)} for city in load_stock("forms").words["P"]]
    html = json.dumps({"stations": stations, "page": index})
    return {"title": "api", "html": html, "content_type": "application/json"}


#: The builder of each kind, from a generator and the page's number: title, html, and what else is not as usual.
TRAPS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "link_farm": _link_farm,
    "spam": _spam,
    "toxic": _toxic,
    "short": _short,
    "empty_body": _empty_body,
    "not_found": _not_found,
    "json": _json,
}
