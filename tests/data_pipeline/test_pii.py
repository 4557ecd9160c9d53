"""Personal data: what is found, what is not, and that neither time nor order can be abused.

The tables are written by hand from the definitions: RFC 5321 and the root zone for e-mail, national numbering plans
(numbers reserved for examples and published switchboards) for phones, card networks' published test numbers, the IBAN
registry's examples, and IANA's registries for addresses.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.data_pipeline.page.document import Page
from quern.data_pipeline.stages import pii_finders
from quern.data_pipeline.stages.pii import TYPES, PiiConfig, PiiTags, ScrubPii, find, scrub
from support.growth import assert_grows_tamely
from support.named_cases import each, with_each

# In each text, «…» marks what has to be found; a text without marks holds nothing.
EMAILS = [
    "«john@example.com»", "mail me at «a@b.com»", "Write to «john.smith@mail.example.co.uk».", "<«john@example.com»>",
    "mailto:«john@example.com»?subject=x", "(«john@example.com»)", "'«john@example.com»'", "\"«john@example.com»\"",
    "«first+tag@gmail.com», «x_y-z@web.de»; «n%v@host.org»", "«o'brien@example.ie»", "«JOHN@EXAMPLE.COM»!",
    "«1234@qq.com»", "邮箱«abc@163.com»联系", "mail：«abc@example.cn»。", "«jörg@bücher.de»", "«иван@почта.рф»",
    "«a@xn--bcher-kva.xn--p1ai»", "x@y,«john@example.com»", "«john@example.com».Thanks", "«john@example.com»\n",
    "email=«john@example.com»&x=1", "...«john@example.com»", "«john@[8.8.4.4]»", "«a@example.museum»", "/«a@b.io»/",
    "«" + "a" * 64 + "@example.com»", "«a@" + "b" * 63 + ".com»", "«john@example.com»-", "E-Mail:«info@firma.de» Tel",
    "«a@a.com»«@»".replace("«@»", " ") + "«b@b.com»", "author <«j@users.noreply.github.com»>", "|«a@b.org»|",
    "https://«ann.smith@example.com»", "https://example.com/ by:«ann@b.org»", "https://a.b:80/«ann@b.org»", "://x:«ann@b.org»",
    "https://x:y and «ann@b.org»",
]  # fmt: skip
EMAIL_TRAPS = [
    "user at example dot com", "@john", "@app.route", "john@", "john@localhost", "a@b", "icon@2x.png",
    "lodash@4.17.21", "git@github.com:user/repo.git", "ssh://git@github.com/user/repo", "a@b@c", "x@y.invalidtld",
    "user@host.local", "5 apples @ $2.50", "meet @ noon.com at @cafe.com", "@scope/package@1.2.3", "foo@bar..com",
    "john.@example.com", "a" * 65 + "@example.com", "a@" + "b" * 64 + ".com", "a@-b.com", "@alice@mastodon.social",
    "A@B.T", "f(x)@g(y)", "react@^18.2.0", "image@3x.jpg", "..@example.com", "john @ example.com",
    "data.zip@backup.zip", "https://medium.com/@user", "a@b_c.com", "@media (max-width: 3px)", "php@8.1.2-fpm",
    "name@中国", "https://user:password@example.com/x", "postgres://ann:s3cret@db.example.com:5432/x",
    "ftp://user:pa.ss:wo-rd@example.com",
]  # fmt: skip
PHONES = [
    "«+1 202 555 0123»", "call «+49 30 901820» now", "«+49 (0)30 901820»", "«+44 20 7946 0958».",
    "«+44 (0)20 7946 0958»", "«+33 1 42 68 53 00»", "«+33142685300»", "«+39 06 6982»", "«+86 10 6552 9988»",
    "«+7 495 697-03-49»", "«+91-22-2202-6364»", "«+81 3-3213-1111»", "«+41446681800»", "«+353 1 679 6000»,",
    "«+61 2 9374 4000»", "«+55 11 2395-8400»", "«+420 224 811 111»", "«+30 210 1234567»", "电话：«+86 10 6552 9988»。",
    "Tel.:«+48 22 694 75 00»", "«0049 30 901820»", "«00 44 20 7946 0958»", "«(415) 555-2671»", "«415-555-2671»",
    "«415.555.2671»", "«1-415-555-2671»", "«1 (415) 555-2671»", "(«415-555-2671»)", "«415-555-2671», «212-555-0100»",
    "«+1 415 555 2671» 2023", "«+1-415-555-2671»x12", "tel:«+14155552671»", "fax «+49.30.901820»",
    "«(800) 555-1212»\n", "«+32 2 555 12 12»",
]  # fmt: skip
PHONE_TRAPS = [
    "ISBN 978-0-306-40615-7", "ISBN 0-306-40615-2", "ISSN 0378-5955", "doi:10.1000/182.415-555", "2001-2002-2003",
    "2020-01-02 10:20:30", "1,234,567.89", "$1.234.567,89", "+100 200 300 400", "123-45-6789", "000-000-0000", "+49",
    "123-456-7890", "555-555-5555", "1415926535", "3.14159265358979", "order 415-555-2671", "x+4915112345678",
    "+1234", "2019-01-01T00:00:00+01:00", "550e8400-e29b-41d4-a716-446655440000", "4155552671", "113-4567890-1234567",
    "415-555-26712", "9415-555-2671", "415-555-2671-99", "12-415-555-2671", "10.415-555-2671", "+0123456789",
    "0x4155552671", "49 30 901820", "192.168.100.200", "pages 415-555", "1 000 000 000 000", "+20 000 000 000",
    "0.0049 30 901820", "0000000000000000", "++4930901820", "a_415-555-2671", "415-555-2671b",
    "version 4.15.0-555.2671", "030 901820", "ISBN-10: 415-555-2671", "ISBN 13 415-555-2671",
]  # fmt: skip
NATIONAL = [
    ("de", "Tel: «030 901820»"), ("de", "Telefon «(030) 901820»"), ("de", "Fax. «030/901820»"),
    ("de", "Mobil: «0151 23456789»"), ("fr", "Tél. : «01 42 68 53 00»"), ("en", "Phone: «020 7946 0958»"),
    ("en", "call us at «202 555 0123»"), ("zh", "电话：«010-65529988»"), ("ja", "TEL «03-3213-1111»"),
    ("ru", "тел. «8 (495) 697-03-49»"), ("de", "030 901820"), ("de", "Hotel 030 901820"),
    ("de", "Tel: 5 und 030 901820 Stück"), ("de", "Tel: 2020-01-02"), ("xx", "Tel: 030 901820"),
    ("en", "mobile homes: 12,345,678"), ("de", "Tel:\n«030 901820»"), ("de", "Tel: 1.2.2020 12"),
]  # fmt: skip
CARDS = [
    "«4111 1111 1111 1111»", "«4111-1111-1111-1111»", "«4111111111111111»", "«4012888888881881».",
    "«5555555555554444»", "«5105 1051 0510 5100»,", "«2223003122003222»", "«378282246310005»", "«3714 496353 98431»",
    "«30569309025904»", "«3852 000002 3237»", "«6011111111111117»", "«3530111333300000»", "«6200000000000005»",
    "card:«4242424242424242»", "卡号«4242424242424242»。", "order paid with «4242 4242 4242 4242»",
]  # fmt: skip
CARD_TRAPS = [
    "4111 1111 1111 1112", "4111111111111112", "1234567812345670", "9111111111111111", "0000000000000000",
    "41111111111111111", "x4111111111111111", "4111111111111111x", "0.4111111111111111", "4111 1111 11111111",
    "4111-1111 1111-1111", "978-0-306-40615-7", "1700000000000", "order no. 4111111111111111",
    "ISBN: 4242424242424242", "4242424242424242.5", "3.4242424242424242", "4 2 4 2 4 2 4 2 4 2 4 2 4 2 4 2",
    "37828224631000", "4222222222222", "ISBN-13: 4242424242424242",
]  # fmt: skip
IBANS = [
    "«GB82 WEST 1234 5698 7654 32»", "«DE89370400440532013000»", "«DE89 3704 0044 0532 0130 00».",
    "IBAN:«FR14 2004 1010 0505 0001 3M02 606»", "«NL91ABNA0417164300»,", "«BE68 5390 0754 7034» BIC",
    "«CH9300762011623852957»", "«AT611904300234573201»", "«ES9121000418450200051332»",
    "«IT60X0542811101000000123456»", "«NO93 8601 1117 947»", "«MT84MALT011000012345MTLCAST001S»",
    "«PL61109010140000071219812874»", "账号«SA0380000000608010167519»。", "«GB82 WEST 1234 5698 7654 32» AND",
]  # fmt: skip
IBAN_TRAPS = [
    "GB82 WEST 1234 5698 7654 33", "DE00370400440532013000", "DE8937040044053201300", "DE893704004405320130001",
    "XX89370400440532013000", "XDE89370400440532013000", "de89370400440532013000x", "ISO 9001 2015 AB12 CD34", "AB12",
    "US64SVBKUS6S3300958879", "GB82-WEST-1234", "DE89 3704", "COVID19 2020 2021 2022 2023",
    "A4B5 1234 5678 9012 3456",
]  # fmt: skip
IPV4 = [
    "«8.8.8.8»", "at «8.8.8.8».", "«8.8.8.8», «1.1.1.1»", "http://«93.184.216.34»/x", "«93.184.216.34»:8080",
    "(«8.8.4.4»)", "地址«8.8.8.8»。", "IP:«8.8.8.8»", "«8.8.8.0»/24", "«8.8.8.1»-«8.8.8.9»", "root@«8.8.8.8»",
    "«8.8.8.8»\n", "[«8.8.8.8»]", "«223.5.5.5»;", "«8.8.8.8»!", "«1.0.0.1»", "=«8.8.8.8»", "\"«8.8.8.8»\"",
    "<«8.8.8.8»>", "«8.8.8.8» port 53", "«208.67.222.222»?", "from «66.249.66.1» - -", "«8.8.8.8»/«8.8.4.4»",
    "«8.8.8.8».Then", "«100.63.255.255»", "«9.9.9.9»...", "server «17.0.4.1»", "from java to «17.0.4.1»",
]  # fmt: skip
IPV4_TRAPS = [
    "4.15.0.99.3", "1.3.6.1.4.1", "1234.5.6.7.8", "v8.8.8.8", "version 4.15.0.99", "192.168.1.1", "10.0.0.1",
    "127.0.0.1", "172.16.5.4", "169.254.1.1", "0.0.0.0", "255.255.255.255", "192.0.2.1", "198.51.100.7",
    "203.0.113.9", "100.64.0.1", "224.0.0.251", "8.8.8", "8.8.8.256", "8.8.8.8888", "08.08.08.08", "8.8.8.8.8",
    "8.8.8.8.in-addr.arpa", "Chrome/49.0.2.112", "linux-4.15.0.99", "1.2.3.4-1ubuntu2", "x8.8.8.8", "8.8.8.8x",
    "OID: 1.3.6.1", "Section 4.1.2.3", "§ 4.1.2.3", "EC 2.4.2.30", "v.8.8.8.8", "Release 8.8.8.8", "8..8.8.8",
    "8,8,8,8", "_8.8.8.8", "OID (2.5.29.15)", "OIDs: 2.5.29.15", "object identifier 2.5.29.15", "versions 4.15.0.99",
    "sections 4.1.2.3", "name==4.15.0.99", "name>=4.15.0.99", "name >= 4.15.0.99", "name~=4.15.0.99", "~> 4.15.0.99",
    "4.15.0.99+git", "4.15.0.99~beta", "Java 17.0.4.1", "Java SE 17.0.4.1", "OpenJDK 17.0.4.1", "JDK: 17.0.4.1",
    "Rails 6.0.3.1", "upgraded to 17.0.4.1", "LibreOffice 7.4.2.3", "Chrome 49.0.2.112",
]  # fmt: skip
IPV6 = [
    "«2001:4860:4860::8888»", "«2001:4860:4860::8888».", "[«2606:4700:4700::1111»]:443", "«2600::»",
    "«2A00:1450:4001:81B::200E»", "地址«2001:4860:4860::8844»。", "«2001:4860:4860:0000:0000:0000:0000:8888»",
    "«2001:4860:4860::8888»/64", "IP: «2620:fe::fe»,", "address «2620:fe::fe»: ok", "«2001:4860:4860::8.8.8.8»",
    "(«2620:fe::9»)", "«2620:fe::9» and «2620:fe::10»",
]  # fmt: skip
IPV6_TRAPS = [
    "::", "::1", "fe80::1", "fc00::1", "2001:db8::1", "std::vector", "dead::beef", "a::b", "12:34:56",
    "00:1A:2B:3C:4D:5E", "2024:01:02", "2024:01:02 03:04:05", "2001:4860", "x2001:4860:4860::8888",
    "2001:4860:4860::8888x", "ff02::1", "2001:::1", "2001:4860:4860::88888", "2001:1:2:3:4:5:6:7:8", ":2001:4860::1",
    "3fff::1", "2001::4860::1", "1:2:3:4:5:6:7:8", "abcd:ef01::", "2012:", "2001:10::1",
]  # fmt: skip

CASES = [
    *(("email", text) for text in EMAILS + EMAIL_TRAPS),
    *(("phone", text) for text in PHONES + PHONE_TRAPS),
    *(("credit_card", text) for text in CARDS + CARD_TRAPS),
    *(("iban", text) for text in IBANS + IBAN_TRAPS),
    *(("ipv4", text) for text in IPV4 + IPV4_TRAPS),
    *(("ipv6", text) for text in IPV6 + IPV6_TRAPS),
]


def scrubbed(text: str | None, config: PiiConfig | None = None, language: str | None = None) -> Page:
    """The page of a text, as the stage leaves it."""
    return ScrubPii(config or PiiConfig())(Page("s", "f", "f", 0, text=text, language=language))


def unmarked(text: str) -> tuple[str, list[str]]:
    parts = text.replace("»", "«").split("«")
    return "".join(parts), parts[1::2]


#: Of card numbers: first and last of the leading digits, and lengths (ranges of ISO/IEC 7812 as networks publish them).
ISSUERS = [
    ("4", "4", (16, 19)), ("51", "55", (16,)), ("2221", "2720", (16,)), ("34", "34", (15,)), ("37", "37", (15,)),
    ("36", "36", (14,)), ("38", "39", (14,)), ("300", "305", (14,)), ("3095", "3095", (14,)),
    *((first, last, (16, 17, 18, 19)) for first, last in (
        ("3528", "3589"), ("62", "62"), ("65", "65"), ("644", "649"), ("6011", "6011"))),
    *((first, last, (12, 13, 14, 15, 16, 17, 18, 19)) for first, last in (
        ("5018", "5018"), ("5020", "5020"), ("5038", "5038"), ("5893", "5893"), ("6304", "6304"), ("6759", "6759"),
        ("6761", "6763"))),
]  # fmt: skip


@pytest.mark.slow
def test_card_numbers_are_of_the_ranges_and_lengths_in_use() -> None:
    for four, length in itertools.product(map(str, range(1000, 10_000)), range(12, 20)):
        expected = any(first <= four[: len(first)] <= last and length in lengths for first, last, lengths in ISSUERS)
        assert pii_finders._has_issuer(four.ljust(length, "0")) == expected, (four, length)


def test_exactly_what_is_marked_is_found() -> None:
    def check(kind: Any) -> None:
        def check(marked: str) -> None:
            text, expected = unmarked(marked)
            for before, after in (("", ""), ("see ", " there"), ("\n", "\n"), ("这里，", "。那里")):
                spans = find(before + text + after, (kind,))
                assert [(before + text + after)[span.start : span.end] for span in spans] == expected

        each([marked for its_kind, marked in CASES if its_kind == kind], check)

    each(TYPES, check)


@with_each(*NATIONAL)
def test_national_numbers_need_a_word_for_phone(language: str, marked: str) -> None:
    text, expected = unmarked(marked)
    result = scrubbed(text, language=language)
    assert result.measures["pii.phones"] == len(expected)
    for number in expected:
        assert number not in (result.text or "")


def test_phone_regions_add_to_the_language() -> None:
    config = PiiConfig(phone_regions=("DE",))
    assert scrubbed("Tel: 030 901820", config, language="xx").text == "Tel: |||PHONE_NUMBER|||"


def test_page_is_masked_and_counted() -> None:
    text = "Ann: ann@example.com, +49 30 901820.\nbob@example.com 8.8.8.8 2620:fe::fe\n"
    text += "4111 1111 1111 1111 DE89370400440532013000"
    page = scrubbed(text)
    assert page.text == (
        "Ann: |||EMAIL_ADDRESS|||, |||PHONE_NUMBER|||.\n|||EMAIL_ADDRESS||| |||IP_ADDRESS||| |||IP_ADDRESS|||\n"
        "|||CREDIT_CARD||| |||IBAN|||"
    )
    assert page.measures == {
        "pii.emails": 2, "pii.phones": 1, "pii.credit_cards": 1, "pii.ibans": 1, "pii.ipv4": 1, "pii.ipv6": 1,
    }  # fmt: skip
    assert page.failures == []


@pytest.mark.parametrize("limits", [{}, {"max_spans": 0}])
def test_measuring_leaves_the_text_and_drops_nothing(limits: dict[str, int]) -> None:
    page = scrubbed("ann@example.com", PiiConfig(action="measure", **limits))
    assert page.text == "ann@example.com"
    assert page.measures["pii.emails"] == 1
    assert page.failures == []


def test_types_not_asked_for_are_neither_masked_nor_measured() -> None:
    config = PiiConfig(types=("ipv4",))
    page = scrubbed("ann@example.com 8.8.8.8", config)
    assert page.text == "ann@example.com |||IP_ADDRESS|||"
    assert ScrubPii(config).measures == tuple(page.measures) == ("pii.ipv4",)


def test_page_without_text_or_data_stays() -> None:
    config = PiiConfig(max_spans=0)
    assert scrubbed(None, config).measures == {}
    page = scrubbed("", config)
    assert (page.text, page.failures) == ("", [])
    assert set(page.measures.values()) == {0.0}


def test_too_many_finds_fail() -> None:
    config = PiiConfig(max_spans=2)
    assert scrubbed("a@b.com 8.8.8.8", config).failures == []
    assert scrubbed("a@b.com 8.8.8.8 c@d.com", config).failures == [("pii", "pii.too_many")]


def test_a_text_of_personal_data_alone_does_not_pass_where_tags_are_empty() -> None:
    config = PiiConfig(tags=PiiTags(email=""))
    assert scrubbed(" ann@example.com\n", config).failures == [("pii", "pii.nothing_left")]
    assert scrubbed("ann@example.com.", config).failures == []


def test_tags_are_the_config_s() -> None:
    tags = PiiTags(email="[e-mail]")
    assert scrub("ann@example.com", tags=tags)[0] == "[e-mail]"


@with_each(
    "<|endoftext|>",
    "<EMAIL>",
    "</s>",
    "x<s>y",
    "[INST]",
    "[mask]",
    "tag1",
    "a@b.com",
    "a\nb",
    "x" * 65,
    "<<SYS>>",
)
def test_control_tokens_and_unstable_tags_are_refused(tag: str) -> None:
    with pytest.raises(ValidationError, match="expected"):
        PiiTags(phone=tag)


@with_each({"types": ("name",)}, {"action": "drop"}, {"max_spans": -1}, {"phone_regions": ("XX",)})
def test_impossible_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PiiConfig(**wrong)


PIECES = [
    "a@b.com", "a", "@", ".", "8.8.8.8", "+1 415 555 2671", "415-555-2671", "1", "-", " ", "4111 1111 1111 1111",
    "tel ", "+", "GB82 WEST 1234 5698 7654 32", "2620:fe::fe", ":", "030 901820", "00", "com", "(", ")", "x", "é",
    "中", "\n", "/", "version ", "4242424242424242", "[8.8.8.8]", "git@b.com", "|||EMAIL_ADDRESS|||", "2", "%", "'",
    "_", "order ", "DE89370400440532013000",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.text("ab@.:+-0123456789 |\n", max_size=60),
    st.text(max_size=40),
)


@settings(max_examples=60)
@given(TEXTS)
@example("415-555-26714111 1111 1111 1111")
def test_scrubbed_text_holds_nothing_more(text: str) -> None:
    once, _ = scrub(text, regions=("DE", "US"))
    again, counts = scrub(once, regions=("DE", "US"))
    assert again == once
    assert sum(counts.values()) == 0


@settings(max_examples=40)
@given(TEXTS)
def test_spans_are_in_order_and_apart(text: str) -> None:
    spans = find(text, regions=("DE",))
    assert all(0 <= span.start < span.end <= len(text) for span in spans)
    assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
    assert spans == find(text, regions=("DE",))
    for span in spans:
        assert span.type in TYPES


SEEN = {
    "ann@example.com": "|||EMAIL_ADDRESS|||",
    "+49 30 901820": "|||PHONE_NUMBER|||",
    "4111 1111 1111 1111": "|||CREDIT_CARD|||",
    "DE89370400440532013000": "|||IBAN|||",
    "8.8.8.8": "|||IP_ADDRESS|||",
    "2620:fe::fe": "|||IP_ADDRESS|||",
    "12 apples": "12 apples",
    "v1.2.3.4": "v1.2.3.4",
    "grüße": "grüße",
    "4111111111111112": "4111111111111112",
    "": "",
}


@given(
    st.lists(st.sampled_from(sorted(SEEN)), max_size=10),
    st.sampled_from([" and ", ", ", "\n", " | ", "; ", "。", "\n\n- "]),
)
def test_only_what_is_personal_is_replaced(parts: list[str], between: str) -> None:
    text, counts = scrub(between.join(parts))
    assert text == between.join(SEEN[part] for part in parts)
    assert sum(counts.values()) == sum(SEEN[part] != part for part in parts)


def test_overlapping_finds_are_one_and_leave_no_half_behind() -> None:
    # an address literal holds an IPv4 address, and the mail address covers it
    assert [(span.type, span.start, span.end) for span in find("a@[8.8.8.8]")] == [("email", 0, 11)]
    # a Berlin number as far as its plan allows, and a card that begins with its last group
    assert scrub("+49 30 9018 4111 1111 1111 1111 x")[0] == "|||PHONE_NUMBER||| x"


@pytest.mark.slow
def test_a_table_of_signed_numbers_is_no_phone_book() -> None:
    # nobody in North America has a number of six digits
    text = "".join(f"+1.{number * 7919 % 10**6:06d}\n" for number in range(20_000))
    assert find(text, ("phone",)) == []


@pytest.mark.slow
def test_numbers_past_the_bound_of_lookups_are_masked() -> None:
    numbers = [f"+1 415 555 {number:04d}\n" for number in range(9_999)]
    assert len(find("".join(numbers), ("phone",))) == len(numbers)


def test_find_hidden_by_its_neighbour_is_found_after_it() -> None:
    text, counts = scrub("8.8.8.8/415-555-2671")
    assert text == "|||IP_ADDRESS|||/|||PHONE_NUMBER|||"
    assert (counts["ipv4"], counts["phone"]) == (1, 1)


ADVERSARIAL = [
    "a@", "@", "1.", "+", "7", "::", "2001:", "a", "a.", "a@b.", "+1 ", "+14155552671 ", "00 12 34 ", "415-555-2671 ",
    "AB12 ", "GB82WEST12345698765432 ", "4111 ", "1 ", "8.8.8.8 ", "tel ", "tel 030 90182 ", "(", "A", "AA11", "0",
    "2222:", "x@y.com ", "-", "1-", "+1 2 3 4 5 6 7 8 9 ", "a" * 70 + "@", "@" + "a-" * 40, "+49 (",
    "4242424242424242 ", "%",
]  # fmt: skip


@pytest.mark.slow
def test_time_grows_with_length_and_not_with_its_square() -> None:
    """Eight times the text: a quadratic pattern takes 64 times as long."""

    def check(unit: str) -> None:
        short, long = ((unit * n)[:n] for n in (12_500, 100_000))
        assert_grows_tamely(lambda text: find(text, regions=("US", "DE")), short, long, 24)

    find("a@b.com +1 415 555 2671", regions=("US", "DE"))  # what is loaded once is loaded
    each(ADVERSARIAL, check)


def test_checks_of_numbers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 a text and one more for every 32 characters; behind them the form decides."""
    checked: list[str] = []

    def exists(digits: str, region: str) -> bool:
        checked.append(digits)
        return False

    monkeypatch.setattr(pii_finders, "_exists", exists)
    text = "+1 000123\n" * 4000
    bound = 2000 + len(text) // 32
    assert len(find(text, ("phone",))) == 4000 - bound
    assert len(checked) == bound
