"""Bytes to text: the order of evidence, labels as browsers read them, cut and dirty pages."""

from __future__ import annotations

import codecs
import io
import tokenize
import tracemalloc
from itertools import product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.data_pipeline.sources import charset
from quern.data_pipeline.sources.charset import _detect, codec_for, decode, header_charset, printable
from support.growth import assert_grows_tamely
from support.named_cases import each, with_each

GERMAN = "Die Straße führt über die Brücke, sagte Müller – „schön“. " * 40
CHINESE = "北京市民今天在公园里庆祝节日,天气很好。" * 40
RUSSIAN = "Сегодня в Москве хорошая погода, дети играют во дворе. " * 40
JAPANESE = "今日は天気がいいので、公園を散歩しました。" * 40
KOREAN = "오늘은 날씨가 좋아서 공원에서 산책을 했습니다. " * 40
GREEK = "Σήμερα ο καιρός είναι καλός και τα παιδιά παίζουν. " * 40
POLISH = "Dziś jest ładna pogoda, dzieci bawią się na podwórku. Żółta gęś. " * 40

#: Label → the Python codec that is the same table in the WHATWG Encoding Standard.
SAMPLES = [
    ("iso-8859-1", "cp1252", GERMAN),
    ("ISO-8859-1", "cp1252", GERMAN),
    ("windows-1252", "cp1252", GERMAN),
    ("gb2312", "gb18030", CHINESE),
    ("GBK", "gb18030", CHINESE),
    ("big5", "big5", "今天天氣很好,孩子們在公園裡玩耍。" * 40),
    ("windows-1251", "cp1251", RUSSIAN),
    ("koi8-r", "koi8_r", RUSSIAN),
    ("Shift_JIS", "cp932", JAPANESE + "①②"),
    ("x-sjis", "cp932", JAPANESE),
    ("euc-jp", "euc_jp", JAPANESE),
    ("iso-2022-jp", "iso2022_jp", JAPANESE),
    ("euc-kr", "cp949", KOREAN + "똠방각하"),
    ("iso-8859-7", "iso8859_7", GREEK),
    ("iso-8859-2", "iso8859_2", POLISH),
    ("windows-1250", "cp1250", POLISH),
    ("iso-8859-9", "cp1254", "Bugün hava çok güzel, çocuklar bahçede oynuyor. İğne ş " * 40),
    ("tis-620", "cp874", "วันนี้อากาศดีมาก เด็กๆ เล่นในสวน " * 40),
]


@with_each(*SAMPLES)
def test_a_header_label_means_what_browsers_take_it_for(label: str, codec: str, text: str) -> None:
    decoded = decode(text.encode(codec), label, is_html=False)
    assert decoded is not None
    assert decoded[0] == text


@with_each(*SAMPLES)
def test_a_meta_label_is_found_in_either_form(label: str, codec: str, text: str) -> None:
    for meta in (
        f"<html><head><META CharSet = '{label}'>",
        f'<head><meta http-equiv="Content-Type" content="text/html; charset={label}">',
        f'<?xml version="1.0" encoding="{label}"?><html>',
    ):
        page = meta.encode("ascii") + text.encode(codec)
        decoded = decode(page, None, is_html=True)
        assert decoded is not None
        assert decoded[0] == meta + text


@with_each(
    *product(
        [GERMAN, CHINESE, RUSSIAN, GREEK], ["iso-8859-1", "gb2312", "windows-1251", "utf-8", "no-such-thing", None]
    )
)
def test_valid_utf8_beats_every_label(text: str, label: str | None) -> None:
    assert decode(text.encode(), label, is_html=True) == (text, "utf-8")


@given(
    st.text(st.characters(exclude_characters="\0\x1b\ufeff", exclude_categories=("Cs",))),
    st.sampled_from([None, "big5"]),
)
def test_whatever_is_utf8_is_read_as_utf8(text: str, label: str | None) -> None:
    assert decode(text.encode(), label, is_html=True) == (text, "utf-8")


@given(st.binary(max_size=400), st.sampled_from([None, "utf-8", "gbk", "shift_jis", "utf-16"]), st.booleans())
def test_no_bytes_raise_and_text_can_always_be_stored(payload: bytes, label: str | None, is_html: bool) -> None:
    decoded = decode(payload, label, is_html)
    if decoded is not None:
        decoded[0].encode("utf-8")
        assert "\0" not in decoded[0]


@with_each(
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
)
def test_a_byte_order_mark_beats_every_label_and_is_not_text(bom: bytes, codec: str) -> None:
    decoded = decode(bom + RUSSIAN.encode(codec), "windows-1251", is_html=True)
    assert decoded is not None
    assert decoded[0] == RUSSIAN


def test_the_header_comes_before_meta_and_meta_before_detection() -> None:
    page = b"<meta charset=koi8-r>" + RUSSIAN.encode("cp1251")
    assert decode(page, "windows-1251", is_html=True) == ("<meta charset=koi8-r>" + RUSSIAN, "windows-1251")
    decoded = decode(page, None, is_html=True)
    assert decoded is not None
    assert decoded[1] == "koi8-r"
    assert decode(page, None, is_html=False) == ("<meta charset=koi8-r>" + RUSSIAN, "windows-1251")


def test_a_label_that_does_not_fit_the_bytes_is_passed_over() -> None:
    page = b"<meta charset=gbk>" + CHINESE.encode("gb18030")
    for wrong in ("shift_jis", "utf-8", "us-asci", "utf-16"):
        decoded = decode(page, wrong, is_html=True)
        assert decoded is not None
        assert decoded[0].endswith(CHINESE)


def test_a_commented_meta_and_one_behind_the_prescan_do_not_count() -> None:
    for page in (
        b"<!-- <meta charset=koi8-r> -->" + RUSSIAN.encode("cp1251"),
        b" " * 5000 + b"<meta charset=koi8-r>" + RUSSIAN.encode("cp1251"),
    ):
        decoded = decode(page, None, is_html=True)
        assert decoded is not None
        assert decoded[1] == "windows-1251"


def test_detection_finds_text_behind_megabytes_of_script_on_one_line() -> None:
    page = b"<script>" + b"var x=1;" * 300_000 + b"</script><p>" + RUSSIAN.encode("cp1251")
    decoded = decode(page, None, is_html=True)
    assert decoded is not None
    assert decoded[0].endswith(RUSSIAN)


@pytest.mark.parametrize(
    ("label", "codec", "text"), [("utf-8", "utf-8", CHINESE), ("gbk", "gb18030", CHINESE), ("sjis", "cp932", JAPANESE)]
)
def test_a_page_cut_inside_a_character_loses_that_character_only(label: str, codec: str, text: str) -> None:
    payload = text.encode(codec)
    for cut in range(1, 8):
        decoded = decode(payload[:-cut], label, is_html=False)
        assert decoded is not None
        assert text.startswith(decoded[0])
        assert len(text) - len(decoded[0]) <= cut


def test_a_few_bad_bytes_do_not_lose_a_utf8_page() -> None:
    payload = CHINESE.encode() + b"\xff" + CHINESE.encode() + b"\xe4(" + CHINESE.encode()
    for label in ("utf-8", None, "iso-8859-1"):
        assert decode(payload, label, is_html=True) == (f"{CHINESE}\ufffd{CHINESE}\ufffd({CHINESE}", "utf-8")


def test_a_few_bad_bytes_do_not_lose_a_labelled_legacy_page() -> None:
    decoded = decode(CHINESE.encode("gb18030") + b"\xff" + CHINESE.encode("gb18030"), "gb2312", is_html=True)
    assert decoded is not None
    assert decoded[1] == "gb18030"
    assert decoded[0].startswith(CHINESE)
    assert decoded[0].count("\ufffd") == 1


def test_latin_text_with_a_stray_utf8_character_is_not_taken_for_utf8() -> None:
    payload = GERMAN.encode("cp1252") + "ü".encode() + GERMAN.encode("cp1252")
    decoded = decode(payload, "iso-8859-1", is_html=True)
    assert decoded is not None
    assert decoded[1] == "windows-1252"


def test_bytes_that_are_no_text_are_not_decoded() -> None:
    noise = bytes((i * 167 + i // 7 * 31) % 256 for i in range(4000))
    assert decode(b"\xff\xfb\x90\x00" + noise, None, is_html=False) is None


def test_detection_of_a_page_of_short_lines_costs_little_memory() -> None:
    payload = b"ab\n" * 1_000_000 + RUSSIAN.encode("cp1251")
    tracemalloc.start()
    assert _detect(payload) == ["cp1251"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.slow
@given(st.lists(st.sampled_from([b"a", b" ", b"\n", b"\xe4", b"\xff", b"x" * 300, b"y" * 70_000]), max_size=20))
def test_detection_reads_the_lines_that_are_not_ascii(parts: list[bytes]) -> None:
    expected, payload = b"", b"".join(parts)
    for line in payload.split(b"\n"):
        if not line.isascii() and len(expected) < 1 << 16:
            first = next(i for i, byte in enumerate(line) if byte >= 0x80)
            expected += line[max(0, first - 256) :][: (1 << 16) - len(expected)] + b"\n"
    with mock.patch.object(charset.cchardet, "detect", return_value={"encoding": None}) as detect:
        _detect(payload)
    assert detect.call_args.args[0] == expected[:-1]


def test_codecs_that_are_not_text_encodings_of_the_web_are_unknown() -> None:
    for label in ("utf-7", "hex", "rot13", "unicode_escape", "idna", "base64", "zip", "punycode", ""):
        assert codec_for(label) is None


@with_each(
    ("text/html; charset=UTF-8", "UTF-8"),
    ("text/html;charset='iso-8859-1'", "iso-8859-1"),
    ('text/html; Charset = "gbk"; x=y', "gbk"),
    ("text/html", None),
    (None, None),
)
def test_charset_of_a_content_type(value: str | None, expected: str | None) -> None:
    assert header_charset(value) == expected


def test_lone_surrogates_and_nul_never_reach_a_page() -> None:
    assert printable("a\0b\ud800c\udc00\ud83d\ude00") == "ab\ufffdc\ufffd😀"


@with_each(b"<meta ", b"<meta charset=", b"<!--", b"charset = ", b"\xff<meta charset= ", b"\xe4\xb8", b"<?xml ")
def test_hostile_heads_cost_linear_time(unit: bytes) -> None:
    """Sixteen times the bytes; quadratic would be 256."""
    short, long = (b"\xff" + (unit * (size // len(unit) + 1))[:size] for size in (50_000, 800_000))
    assert_grows_tamely(lambda payload: decode(payload, "utf-8", is_html=True), short, long, 100)


def test_every_label_means_a_codec_that_reads_ascii() -> None:
    wide = ("utf-16", "utf-32")
    for label, codec in charset._CODECS.items():
        assert codecs.lookup(codec).name
        assert codec in charset._NAMES
        text = "plain text" if codec.startswith(wide) else "plain text – ".encode(codec, "ignore").decode(codec)
        assert decode(text.encode(codec), label, is_html=False) is not None


def test_a_page_readable_as_ascii_is_not_the_utf16_it_says_it_is() -> None:
    page = b'<html><head><meta charset="utf-16"></head>' + GERMAN.encode("cp1252")
    decoded = decode(page, None, is_html=True)
    assert decoded is not None
    assert GERMAN in decoded[0]
    assert decoded[1] == "windows-1252"


def test_escapes_of_iso_2022_jp_count_only_where_a_label_says_so() -> None:
    payload = b"<meta charset=iso-2022-jp>" + JAPANESE.encode("iso2022_jp")
    assert payload.isascii()
    assert decode(payload, None, is_html=True) == ("<meta charset=iso-2022-jp>" + JAPANESE, "iso-2022-jp")
    terminal = b"\x1b[1mbold\x1b[0m"
    assert decode(terminal, None, is_html=False) == (terminal.decode(), "utf-8")


@pytest.mark.parametrize(("bom", "codec"), [(codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF32_BE, "utf-32-be")])
def test_a_wide_page_cut_inside_a_unit_is_read_to_the_cut(bom: bytes, codec: str) -> None:
    decoded = decode(bom + RUSSIAN.encode(codec)[:-1], "utf-8", is_html=True)
    assert decoded is not None
    assert decoded[0] == RUSSIAN[:-1]


@pytest.mark.slow
@with_each(*sorted(charset._CODECS))
def test_any_bytes_under_any_label_are_text_or_none(label: str) -> None:
    # A label that is wrong, over bytes that fit it nearly, cut anywhere: a codec may raise what it likes.
    for payload in (
        RUSSIAN.encode("cp1251"),
        GERMAN.encode("utf-16-le"),
        CHINESE.encode("gb18030"),
        bytes(range(256)),
    ):
        for size in range(40, 49):
            decoded = decode(payload[:size], label, is_html=True)
            assert decoded is None or decoded[0].encode("utf-8") is not None


def test_utf32_without_a_mark_is_little_endian() -> None:
    assert decode(GREEK.encode("utf-32-le")[:-2], "utf-32", is_html=False) == (GREEK[:-1], "utf-32")


def test_a_program_is_read_in_the_encoding_that_python_reads_it_in() -> None:
    """The oracle is the standard library's tokenizer."""

    def check(line: str, codec: str) -> None:
        source = f'{line}\nprint("Größe, Привет, こんにちは")\n'.encode(codec, "ignore")
        found = tokenize.detect_encoding(io.BytesIO(source).readline)[0]
        assert codecs.lookup(found) == codecs.lookup(codec)
        with mock.patch.object(charset.cchardet, "detect", return_value={"encoding": "IBM852"}):
            assert decode(source, None, is_html=False, is_file=True) == (source.decode(found), mock.ANY)

    each(
        [
            ("# -*- coding: koi8-r -*-", "koi8_r"),
            ("\n# vim: set fileencoding=euc_jp :", "euc_jp"),
            ("#!/usr/bin/python\n \t# coding=cp1251", "cp1251"),
            ("# encoding: iso8859_5", "iso8859_5"),
            ("#coding:\tshift_jis", "shift_jis"),
        ],
        check,
    )
    emacs = '# -*- coding: koi8-r-unix -*-\n"Привет"\n'
    with mock.patch.object(charset.cchardet, "detect", return_value={"encoding": "IBM852"}):
        assert decode(emacs.encode("koi8-r"), None, is_html=False, is_file=True) == (emacs, "koi8-r")


def test_a_coding_line_further_down_or_of_another_encoding_than_the_bytes_does_not_count() -> None:
    german = GERMAN.encode("cp1252")
    for head in (
        b"x = 1\n# coding: koi8-r\n",
        b"\n\n# coding: koi8-r\n",
        b"# coding: shift_jis\n",
        b"# coding: rot13\n",
    ):
        decoded = decode(head + german, None, is_html=False, is_file=True)
        assert decoded is not None
        assert decoded[0] == (head + german).decode("cp1252")
    text = f"# coding: koi8-r\n{GERMAN}"
    assert decode(text.encode(), None, is_html=False, is_file=True) == (text, "utf-8")
    page = decode(b"# coding: koi8-r\n" + german, None, is_html=False)
    assert page is not None
    assert page[1] != "koi8-r"


def test_an_xml_declaration_counts_for_a_file() -> None:
    text = '<?xml version="1.0" encoding="ISO-8859-5"?>\n<a>Привет</a>\n'
    with mock.patch.object(charset.cchardet, "detect", return_value={"encoding": "IBM852"}):
        assert decode(text.encode("iso8859_5"), None, is_html=False, is_file=True) == (text, "iso-8859-5")
        assert decode(text.encode("iso8859_5"), None, is_html=False) != (text, "iso-8859-5")


def test_a_file_with_a_few_strange_bytes_is_windows_1252_and_a_page_of_the_web_is_not() -> None:
    source = b"/* \xa9 2001 Foo Inc. */\n" + b"int main(void) { return 0; }\n" * 9
    assert decode(source, None, is_html=False, is_file=True) == (source.decode("cp1252"), "windows-1252")
    for is_html in (False, True):
        assert decode(source, None, is_html=is_html) is None

    def check(payload: bytes, read: bool) -> None:
        with mock.patch.object(charset.cchardet, "detect", return_value={"encoding": None}):
            assert (decode(payload, None, is_html=False, is_file=True) is not None) is read

    each(
        [
            (b"\xa9" + b"a" * 19, True),
            (b"\xa9" + b"a" * 18, False),
            (b"\xa9\t\f\r\n" + b"a" * 19, True),
            (b"\xa9\x01" + b"a" * 99, False),
            (b"\xa9\x1b" + b"a" * 99, False),
            (b"\xa9\x7f" + b"a" * 99, False),
            (b"\xa9" + b"a" * 99 + b"\x81" + b"a" * 99, False),
        ],
        check,
    )


@with_each(b"#coding: ", b"# ", b"#coding", b"\n", b"\f", b"<?xml encoding", b"<!--")
def test_hostile_heads_of_a_file_cost_linear_time(unit: bytes) -> None:
    short, long = (b"\xff" + (unit * (size // len(unit) + 1))[:size] for size in (50_000, 800_000))
    assert_grows_tamely(lambda payload: decode(payload, None, False, is_file=True), short, long, 100)
