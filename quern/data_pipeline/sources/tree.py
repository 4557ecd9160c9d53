"""Reads folders of plain text or source code: each file is one page."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from itertools import islice

from fsspec.implementations.local import LocalFileSystem

from quern import storage
from quern.data_pipeline.page.document import OUT_OF_MEMORY, Page
from quern.data_pipeline.sources.charset import decode, has_wide_bom

__all__ = ["CODE_SUFFIXES", "TEXT_SUFFIXES", "left_out", "list_tree", "read_file"]

TEXT_SUFFIXES = (".txt", ".md", ".rst")
_CODE = (
    ".ada .adb .asm .bash .bat .c .cc .clj .cljs .cmake .cpp .cs .css .cu .cuh .cxx .d .dart .el .elm .erl .ex .exs "
    ".f .f90 .for .fs .fsx .go .gradle .graphql .groovy .h .hh .hpp .hrl .hs .html .hxx .java .jl .js .jsx .kt .kts "
    ".less .lisp .lua .m .mjs .ml .mli .mm .nim .nix .pas .php .pl .pm .proto .ps1 .py .pyi .pyx .r .R .rb .rkt .rs "
    ".s .sass .scala .scm .scss .sh .sol .sql .sv .swift .tcl .tex .tf .toml .ts .tsx .v .vb .vhd .vhdl .vue .xsl "
    ".yaml .yml .zig"
)
CODE_SUFFIXES = tuple(_CODE.split())
_HTML_SUFFIXES = (".html", ".htm", ".xhtml")


def list_tree(folder: str, suffixes: tuple[str, ...]) -> list[str]:
    """Files below ``folder`` whose name ends in one of ``suffixes``, sorted; nothing hidden, no link followed."""
    fs, inner = storage.split(folder)
    if not isinstance(fs, LocalFileSystem):
        prefix = inner.rstrip("/") + "/"
        names = sorted(storage.list_files(folder))
        return [
            name
            for name in names
            if name.endswith(suffixes)
            and not any(part.startswith(".") for part in str(fs._strip_protocol(name))[len(prefix) :].split("/"))
        ]
    found = []
    for here, folders, names in os.walk(inner):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = posixpath.join(here, name)
            if not name.startswith(".") and name.endswith(suffixes) and not os.path.islink(path):
                found.append(path)
    return sorted(found)


def _holds(folder: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file with one of the suffixes is in a folder, as far as its first thousand folders tell."""
    return any(name.endswith(suffixes) for _, _, names in islice(os.walk(folder), 1000) for name in names)


def left_out(folder: str, suffixes: tuple[str, ...]) -> str | None:
    """Of a local folder that gives no file: the first hidden or linked thing that :func:`list_tree` leaves out, and
    why; None if there is none.
    """
    fs, inner = storage.split(folder)
    if not isinstance(fs, LocalFileSystem):
        return None
    for here, folders, names in os.walk(inner):
        held = [name for name in folders if _holds(posixpath.join(here, name), suffixes)]
        for name in sorted(held) + sorted(name for name in names if name.endswith(suffixes)):
            if name.startswith("."):
                return f"{posixpath.join(here, name)} is hidden, and hidden files and folders are not read"
            if os.path.islink(posixpath.join(here, name)):
                return f"{posixpath.join(here, name)} is a symbolic link, and links are not followed"
        folders[:] = [name for name in folders if not name.startswith(".")]
    return None


def read_file(
    path: str, relative_path: str, source: str, max_bytes: int, fingerprint: str | None = None
) -> Iterator[Page]:
    """The one page of a file; binary, too large, empty and undecodable files carry a fault."""
    page = Page(source, path, relative_path, 0, media="text")
    try:
        with storage.open_read(path, fingerprint) as file:
            _fill(page, file.read(max_bytes + 1), max_bytes)
    except MemoryError:
        page.fault = OUT_OF_MEMORY
    yield page


def _fill(page: Page, payload: bytes, max_bytes: int) -> None:
    if not payload:
        page.fault = "read.empty"
    elif len(payload) > max_bytes:
        page.fault = "read.too_large"
    elif b"\0" in payload and not has_wide_bom(payload):
        page.fault = "read.not_text"
    else:
        decoded = decode(payload, None, is_html=page.relative_path.lower().endswith(_HTML_SUFFIXES), is_file=True)
        if decoded is None:
            page.fault = "read.undecodable"
        else:
            text, page.charset = decoded
            if not text or text.isspace():
                page.fault = "read.empty"
            else:
                page.raw = text
