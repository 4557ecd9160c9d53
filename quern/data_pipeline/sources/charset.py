"""Decodes the bytes of a page or file: finds the encoding and returns the text.

Valid UTF-8 always wins: of pages that are valid multi-byte UTF-8 and carry another label, the label is what is wrong.
After that the order is the browsers' (WHATWG, *Encoding* and *HTML*, "determining the character encoding"): byte order
mark, HTTP header, ``<meta>``, and detection last. Unlike a browser, a label that does not fit the bytes is passed over.

Files of a folder have no HTTP header. What a program's first two lines say (PEP 263) and an XML declaration count for
them, and bytes of which no encoding is recognised are windows-1252 where they are few.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable

import cchardet

__all__ = ["codec_for", "decode", "has_wide_bom", "header_charset", "printable"]

#: Python codec → the labels that mean it (WHATWG Encoding Standard, 4.2, as browsers use them).
_LABELS = {
    "utf-8": "utf-8 utf8 unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8",
    "utf-16-le": "utf-16 utf-16le ucs-2 iso-10646-ucs-2 unicode unicodefeff csunicode",
    "utf-16-be": "utf-16be unicodefffe",
    "utf-32-le": "utf-32 utf-32le",
    "utf-32-be": "utf-32be",
    "cp1252": "windows-1252 cp1252 x-cp1252 iso-8859-1 iso8859-1 iso_8859-1 iso88591 iso_8859-1:1987 iso-ir-100 latin1 "
    "l1 latin-1 cp819 ibm819 csisolatin1 ascii us-ascii ansi_x3.4-1968",
    "iso8859_2": "iso-8859-2 iso8859-2 iso_8859-2 iso88592 iso_8859-2:1987 iso-ir-101 latin2 l2 csisolatin2",
    "iso8859_3": "iso-8859-3 iso8859-3 iso_8859-3 iso88593 iso_8859-3:1988 iso-ir-109 latin3 l3 csisolatin3",
    "iso8859_4": "iso-8859-4 iso8859-4 iso_8859-4 iso88594 iso_8859-4:1988 iso-ir-110 latin4 l4 csisolatin4",
    "iso8859_5": "iso-8859-5 iso8859-5 iso_8859-5 iso88595 iso_8859-5:1988 iso-ir-144 cyrillic csisolatincyrillic",
    "iso8859_6": "iso-8859-6 iso8859-6 iso_8859-6 iso88596 iso_8859-6:1987 iso-8859-6-e iso-8859-6-i iso-ir-127 arabic "
    "asmo-708 ecma-114 csisolatinarabic csiso88596e csiso88596i",
    "iso8859_7": "iso-8859-7 iso8859-7 iso_8859-7 iso88597 iso_8859-7:1987 iso-ir-126 greek greek8 ecma-118 elot_928 "
    "sun_eu_greek csisolatingreek",
    "iso8859_8": "iso-8859-8 iso8859-8 iso_8859-8 iso88598 iso_8859-8:1988 iso-8859-8-e iso-8859-8-i iso-ir-138 hebrew "
    "visual logical csisolatinhebrew csiso88598e csiso88598i",
    "cp1254": "windows-1254 cp1254 x-cp1254 iso-8859-9 iso8859-9 iso_8859-9 iso88599 iso_8859-9:1989 iso-ir-148 latin5 "
    "l5 csisolatin5",
    "iso8859_10": "iso-8859-10 iso8859-10 iso885910 iso-ir-157 latin6 l6 csisolatin6",
    "iso8859_13": "iso-8859-13 iso8859-13 iso885913",
    "iso8859_14": "iso-8859-14 iso8859-14 iso885914",
    "iso8859_15": "iso-8859-15 iso8859-15 iso885915 iso_8859-15 latin9 l9 csisolatin9",
    "iso8859_16": "iso-8859-16",
    "cp1250": "windows-1250 cp1250 x-cp1250",
    "cp1251": "windows-1251 cp1251 x-cp1251",
    "cp1253": "windows-1253 cp1253 x-cp1253",
    "cp1255": "windows-1255 cp1255 x-cp1255",
    "cp1256": "windows-1256 cp1256 x-cp1256",
    "cp1257": "windows-1257 cp1257 x-cp1257",
    "cp1258": "windows-1258 cp1258 x-cp1258",
    "cp874": "windows-874 cp874 dos-874 tis-620 tis620 iso-8859-11 iso8859-11 iso885911",
    "cp866": "ibm866 cp866 866 csibm866",
    "cp852": "ibm852 cp852",
    "cp855": "ibm855 cp855",
    "koi8_r": "koi8-r koi8 koi koi8_r cskoi8r",
    "koi8_u": "koi8-u koi8-ru",
    "mac_roman": "macintosh mac x-mac-roman csmacintosh",
    "mac_cyrillic": "x-mac-cyrillic x-mac-ukrainian mac-cyrillic maccyrillic",
    "gb18030": "gb18030 gbk x-gbk cp936 ms936 gb2312 gb_2312 gb_2312-80 csgb2312 csiso58gb231280 iso-ir-58 chinese "
    "euc-cn",
    "big5hkscs": "big5 big5-hkscs cn-big5 x-x-big5 csbig5",
    "euc_jp": "euc-jp x-euc-jp cseucpkdfmtjapanese",
    "cp932": "shift_jis shift-jis sjis x-sjis ms_kanji ms932 cp932 windows-31j csshiftjis",
    "iso2022_jp": "iso-2022-jp csiso2022jp",
    "cp949": "euc-kr uhc cp949 ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 korean windows-949 iso-ir-149 cseuckr "
    "csksc56011987",
}
_CODECS = {label: codec for codec, labels in _LABELS.items() for label in labels.split()}
#: Codec → the name a reader of a verdict knows it by.
_NAMES = {codec: labels.split()[0] for codec, labels in _LABELS.items()}

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_HEADER = re.compile(r"charset\s{0,9}=\s{0,9}[\"']?\s{0,9}([^\s\"';,]{1,40})", re.IGNORECASE)
_META = re.compile(rb"<meta\b[^>]{0,400}?\bcharset\s{0,9}=\s{0,9}[\"']?\s{0,9}([A-Za-z0-9_.:\-]{2,40})", re.IGNORECASE)
_XML = re.compile(rb"^\s*<\?xml\b[^>]{0,200}?\bencoding\s{0,9}=\s{0,9}[\"']([A-Za-z0-9_.:\-]{2,40})", re.IGNORECASE)
#: PEP 263, for one line; Emacs and Vim write the same into comments of other languages.
_CODING = re.compile(rb"[ \t\f]*#.*?coding[:=][ \t]*([-_.a-zA-Z0-9]{1,40})")
_NO_CODE = re.compile(rb"[ \t\f]*(?:#|\r?$)")
_LINE_ENDS = re.compile(r"-(?:unix|dos|mac)$")
_COMMENT = re.compile(rb"<!--.*?-->", re.DOTALL)
_PRESCAN_BYTES = 4096
_SAMPLE_BYTES = 1 << 16
#: A page is UTF-8 (or what its label says) with dirt in it when at most one of so many characters beyond ASCII is bad.
_DIRT = 20
_NOT_ASCII = re.compile(rb"[\x80-\xff]")
_HIGH_BYTES = bytes(range(0x80, 0x100))
#: A file in no known encoding is windows-1252 when at most one of so many bytes is not ASCII, and none is a control.
_FEW = 20
#: So many bytes beyond ASCII tell a detector nothing: it names some code page of DOS or of the East for a © or an é.
_EVIDENCE = 32
_CONTROLS = bytes(byte for byte in (*range(0x20), 0x7F) if byte not in b"\t\n\f\r")


def codec_for(label: str) -> str | None:
    """The Python codec a label means to a browser (``iso-8859-1``: cp1252, ``gb2312``: gb18030); None if unknown."""
    return _CODECS.get(label.strip().lower())


def header_charset(content_type: str | None) -> str | None:
    """The ``charset`` parameter of a Content-Type value, as written; None when there is none."""
    match = _HEADER.search(content_type, 0, 1000) if content_type else None
    return match.group(1) if match else None


def has_wide_bom(payload: bytes) -> bool:
    """Whether the bytes start as UTF-16 or UTF-32 text does, where NUL bytes are no sign of a binary file."""
    return payload.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE))


def printable(text: str) -> str:
    """``text`` that may come from escapes as ``Page.raw`` holds it: no NUL, lone surrogates replaced by U+FFFD."""
    text = text.replace("\0", "")
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def decode(payload: bytes, header_charset: str | None, is_html: bool, is_file: bool = False) -> tuple[str, str] | None:
    """``(text without NUL, charset used)``, or None when no encoding fits. No codec here makes a lone surrogate.

    ``is_file``: the payload is a file of a folder, and no page of the web. A character cut off at the very end
    (crawlers cap pages by bytes) is left out. Bytes that are no text in the encoding chosen become U+FFFD, which is
    allowed for at most one in 20 of the characters beyond ASCII.
    """
    decoded = _decode(payload, header_charset, is_html, is_file)
    return decoded and (decoded[0].replace("\0", ""), decoded[1])


def _decode(payload: bytes, header_charset: str | None, is_html: bool, is_file: bool) -> tuple[str, str] | None:
    for bom, codec in _BOMS:
        if payload.startswith(bom):
            text = _strict(payload[len(bom) :], codec) or _with_dirt(payload[len(bom) :], codec)
            if text is not None:
                return text, codec if codec.startswith("utf-32") else _NAMES[codec]
    text = _strict(payload, "utf-8")
    if text is not None and not (b"\x1b" in payload and text.isascii()):
        return text, "utf-8"
    named = _codecs([*([header_charset] if header_charset else []), *_declared(payload, is_html, is_file)])
    if text is not None:
        return _first_fitting(payload, [codec for codec in named if codec == "iso2022_jp"]) or (text, "utf-8")

    def western(most: int | None = None) -> list[str]:
        return ["cp1252"] if is_file and _has_few_strange_bytes(payload, most) else []

    decoded = _first_fitting(payload, ["utf-8"], _with_dirt) or _first_fitting(payload, named)
    decoded = decoded or _first_fitting(payload, western(_EVIDENCE))
    if decoded is not None:
        return decoded
    guessed = _detect(payload)
    decoded = _first_fitting(payload, guessed) or _first_fitting(payload, [*named, *guessed], _with_dirt)
    return decoded or _first_fitting(payload, western())


def _has_few_strange_bytes(payload: bytes, most: int | None = None) -> bool:
    high = len(payload) - len(payload.translate(None, _HIGH_BYTES))
    if most is not None and high > most:
        return False
    return high * _FEW <= len(payload) and len(payload.translate(None, _CONTROLS)) == len(payload)


def _codecs(labels: list[str]) -> list[str]:
    return list(dict.fromkeys(codec for codec in map(codec_for, labels) if codec is not None))


def _declared(payload: bytes, is_html: bool, is_file: bool) -> list[str]:
    """Labels a page gives itself. One that was readable as ASCII cannot be UTF-16, whatever it says."""
    found = _program_labels(payload) if is_file else []
    head = _COMMENT.sub(b"", payload[:_PRESCAN_BYTES]) if is_html or is_file else b""
    matches = (_META.search(head) if is_html else None, _XML.search(head))
    found += [match.group(1).decode("ascii") for match in matches if match]
    return [label for label in found if not (codec_for(label) or "").startswith(("utf-16", "utf-32"))]


def _program_labels(payload: bytes) -> list[str]:
    """The label of PEP 263 in the first two lines, as it stands and as WHATWG spells such (``latin_1-unix``)."""
    for line in payload[:_PRESCAN_BYTES].split(b"\n")[:2]:
        if match := _CODING.match(line):
            label = match.group(1).decode("ascii")
            return [label, _LINE_ENDS.sub("", label.lower().replace("_", "-"))]
        if not _NO_CODE.match(line):
            break
    return []


def _strict(payload: bytes, codec: str) -> str | None:
    """Every byte means something, save for a character cut off at the end."""
    try:
        return payload.decode(codec)
    except UnicodeDecodeError as error:
        # Every codec here has characters of at most four bytes, so an earlier error is not a cut.
        if error.start < len(payload) - 4:
            return None
    decoder = codecs.getincrementaldecoder(codec)("strict")
    try:
        return decoder.decode(payload, final=False)
    except UnicodeError:  # some codecs raise it bare
        return None


def _with_dirt(payload: bytes, codec: str) -> str | None:
    text = payload.decode(codec, "replace")
    bad = text.count("\ufffd") - (payload.count(b"\xef\xbf\xbd") if codec == "utf-8" else 0)
    beyond_ascii = len(text) - len(payload.translate(None, _HIGH_BYTES)) if codec == "utf-8" else _beyond_ascii(text)
    return text if bad * _DIRT <= beyond_ascii - bad else None


def _beyond_ascii(text: str) -> int:
    return len(text) - len(text.encode("ascii", "ignore"))


def _first_fitting(
    payload: bytes, candidates: Iterable[str], read: Callable[[bytes, str], str | None] = _strict
) -> tuple[str, str] | None:
    """The text by the first codec with which ``read`` gives one, and the codec's name."""
    texts = ((read(payload, codec), codec) for codec in dict.fromkeys(candidates))
    return next(((text, _NAMES[codec]) for text, codec in texts if text is not None), None)


def _detect(payload: bytes) -> list[str]:
    """cchardet's answer (or nothing) for a bounded sample of the lines that are not ASCII."""
    sample, size, end = [], 0, -1
    while size < _SAMPLE_BYTES and (first := _NOT_ASCII.search(payload, end + 1)) is not None:
        # A minified page is one line; its text may start megabytes behind its scripts.
        start = max(payload.rfind(b"\n", end + 1, first.start()) + 1, end + 1, first.start() - 256)
        end = payload.find(b"\n", first.start())
        end = len(payload) if end < 0 else end
        sample.append(payload[start : min(end, start + _SAMPLE_BYTES - size)])
        size += len(sample[-1]) + 1
    label = cchardet.detect(b"\n".join(sample))["encoding"]
    return [codec for codec in _codecs([label] if label else []) if codec != "utf-8"]
