"""Bad pages: link farms, spam, placeholders, abuse, errors; and unwanted content inside good pages."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from quern.demo.grammar import Voice, load_stock
from quern.demo.layout import link_farm, navigation_page, page, paragraphs

__all__ = ["CONTROL_TOKEN_SENTENCES", "TRAPS", "Trap", "contact", "edited", "lexicon"]

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

SWAPS = {
    "almost": "nearly",
    "nearly": "almost",
    "because": "since",
    "although": "though",
    "every": "each",
    "each": "every",
    "until": "till",
    "often": "frequently",
    "usually": "mostly",
    "nobody": "no-one",
    "somebody": "someone",
    "someone": "somebody",
    "anyone": "anybody",
    "small": "little",
    "began": "started",
    "says": "said",
    "takes": "needs",
    "only": "just",
    "remembers": "recalls",
    "promised": "announced",
    "answers": "replies",
    "replies": "answers",
    "children": "pupils",
    "visitors": "guests",
    "middle": "midst",
    "surprised": "astonished",
    "nearby": "around",
    "several": "some",
    "but": "yet",
}

LATIN = (
    "amet consectetur adipiscing elit sed eiusmod tempor incididunt labore dolore magna aliqua enim minim veniam quis "
    "nostrud exercitation ullamco laboris nisi aliquip commodo consequat duis aute irure reprehenderit voluptate velit "
    "esse cillum fugiat nulla pariatur excepteur sint occaecat cupidatat proident sunt culpa officia deserunt mollit"
)

GOODS = ("watches", "mattresses", "garden hoses", "phone cases", "office chairs", "vitamins", "car tyres", "sunglasses")
CITIES = ("Millbrook", "Eastmere", "Stonewick", "Penfold", "Saltmarsh", "Winterholm", "Ferndale", "Kirchau", "Obersee")


@dataclass(frozen=True)
class Trap:
    """A page that should not be learned from."""

    title: str
    html: str
    host: str | None = None
    status: str = "200 OK"
    content_type: str = "text/html; charset=utf-8"


def contact(index: int, rng: random.Random) -> str:
    """A paragraph with an e-mail address, a phone number, an IP address, and a card or an account by turns."""
    name = rng.choice(("ruth.okafor", "h.prowse", "desk+letters", "tess_marchetti"))
    money = f"the account {IBANS[index % 3]}" if index % 2 else f"the (expired) card {CARDS[index // 2 % 4]}"
    return (
        f"If you want to help, write to {name}@mail{index}.example.org or call {PHONES[index % 4]} on a weekday. "
        f"The flyer still gives {money} for donations, which the treasurer regrets. The camera on the roof answers at "
        f"{ADDRESSES[index % 4]} when it answers at all."
    )


def edited(texts: list[str]) -> list[str]:
    """The paragraphs with a few words replaced: about nine tenths of all 5-word shingles stay the same.

    A replaced word touches five shingles, so ``k`` of ``n`` words give a Jaccard similarity of
    ``(n − 5k) / (n + 5k)``; ``k = n / 105`` makes that 0.91.
    """
    words = [text.split(" ") for text in texts]
    total = sum(map(len, words))
    wanted = max(1, round(total / 105))
    places, last, position = [], -total, 0
    for row, line in enumerate(words):
        for column, word in enumerate(line):
            # Apart from one another, so that no shingle is touched twice.
            if word in SWAPS and position - last >= total // (wanted + 1) // 2:
                places.append((row, column))
                last = position
            position += 1
    for row, column in places[:wanted]:
        words[row][column] = SWAPS[words[row][column]]
    return [" ".join(line) for line in words]


def lexicon() -> tuple[str, ...]:
    """The site's own rude words; no language has them."""
    return load_stock("forms").words["swear"]


def _link_farm(rng: random.Random, index: int, language: str) -> Trap:
    anchors = [
        f"{rng.choice(('Cheap', 'Best', 'Discount'))} {rng.choice(GOODS)} {rng.choice(CITIES)}" for _ in range(180)
    ]
    return Trap(f"Directory {index + 1}", link_farm(f"Directory {index + 1}", anchors, rng), host="links.invalid")


def _navigation(rng: random.Random, index: int, language: str) -> Trap:
    stock = load_stock(language)
    items = []
    for topic in stock.topics:
        voice = Voice(stock, rng, topic)
        items += [voice.say(title) for title in stock.words[f"{topic}.titles"]]
    host = f"index{index}.sample.example"
    return Trap("Index", navigation_page("Index", items, language, host), host=host)


def _spam(rng: random.Random, index: int, language: str) -> Trap:
    good, city = GOODS[index % len(GOODS)], rng.choice(CITIES)
    phrase = f"cheap {good} {city}"
    blocks = [
        f"Looking for {phrase}? Our {phrase} shop has the best {phrase} offers, {phrase} deals and {phrase} coupons.",
        f"Buy {phrase} online. Buy {phrase} today. Buy {phrase} now and save on {phrase} with free {phrase} delivery!",
        f"Why {phrase}? Because {phrase} is the number one {phrase} choice for {phrase} customers who love {phrase}.",
        f"Top ten {phrase} reviews: {phrase} in red, {phrase} in blue, {phrase} for men, {phrase} for women.",
    ]
    texts = [rng.choice(blocks) for _ in range(14)]
    return Trap(
        phrase.title(), page(phrase.title(), paragraphs(texts), "en", "shop.invalid", index), host="shop.invalid"
    )


def _placeholder(rng: random.Random, index: int, language: str) -> Trap:
    latin = LATIN.split()

    def sentence() -> str:
        words = [rng.choice(latin) for _ in range(rng.randint(8, 16))]
        return " ".join(words).capitalize() + "."

    texts = [
        "Welcome to our new website. This is the place where you can tell your visitors who you are and what you do. "
        "Click here to edit this text, add a picture and make the page your own in just a few minutes.",
        "Lorem ipsum dolor sit amet. " + " ".join(sentence() for _ in range(5)),
        "Our team is happy to help you with every question. Describe your service here, and explain in one or two "
        "sentences why your customers should choose you and nobody else in the region.",
        "Lorem ipsum dolor sit amet. " + " ".join(sentence() for _ in range(3)),
        "Add a quote from a satisfied customer here. You can change the colours and the fonts in the settings. Do not "
        "forget to publish the page when you have finished with it.",
    ]
    rng.shuffle(texts)
    return Trap("Your headline here", page("Your headline here", paragraphs(texts), "en", "template.invalid", index))


def _toxic(rng: random.Random, index: int, language: str) -> Trap:
    voice = Voice(load_stock("forms"), rng)
    rants = voice.draw("curse")
    general = Voice(load_stock("en"), rng, "bikes")
    sentences = general.draw("topic bikes", len(rants))
    texts = [f"{rant} {sentence}" for rant, sentence in zip(rants, sentences, strict=True)]
    return Trap(
        "Letters we did not print", page("Letters we did not print", paragraphs(texts), "en", "sample.example", 2)
    )


def _short(rng: random.Random, index: int, language: str) -> Trap:
    text = {
        "en": "This page has moved. You will find the opening hours on the notice board beside the door.",
        "es": "Esta página se ha trasladado. El horario está en el tablón junto a la puerta.",
    }[language]
    return Trap("Moved", page("Moved", paragraphs([text]), language, "sample.example", index))


def _empty_body(rng: random.Random, index: int, language: str) -> Trap:
    script = "<script>document.addEventListener('load', () => { render(window.__STATE__); });</script>"
    html = f'<!DOCTYPE html><html><head><title>App</title>{script}</head><body><div id="root"></div></body></html>'
    return Trap("App", html)


def _empty_payload(rng: random.Random, index: int, language: str) -> Trap:
    return Trap("Nothing", "")


def _not_found(rng: random.Random, index: int, language: str) -> Trap:
    texts = ["The page you were looking for is not here. It may have been moved, renamed or eaten by the goat."]
    return Trap("Not found", page("Not found", paragraphs(texts), "en", "sample.example"), status="404 Not Found")


def _json(rng: random.Random, index: int, language: str) -> Trap:
    stations = [{"name": city, "level_cm": rng.randint(20, 400), "open": rng.random() < 0.5} for city in CITIES]
    return Trap("api", json.dumps({"stations": stations, "page": index}), content_type="application/json")


#: The builder of each kind: generator, page number, language.
TRAPS: dict[str, Callable[[random.Random, int, str], Trap]] = {
    "link_farm": _link_farm,
    "navigation": _navigation,
    "spam": _spam,
    "placeholder": _placeholder,
    "toxic": _toxic,
    "short": _short,
    "empty_body": _empty_body,
    "empty_payload": _empty_payload,
    "not_found": _not_found,
    "json": _json,
}
