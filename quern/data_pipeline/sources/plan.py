"""Lists the files of a source, gives them permanent names, and divides them into partitions.

A page's identity rests on ``relative_path``, so it depends only on how an entry is written and what lies on the store,
never on the order of entries, on other files or on the working directory.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fsspec.implementations.local import LocalFileSystem
from pydantic import Field, field_validator, model_validator

from quern import storage
from quern.config import Section
from quern.data_pipeline.sources.commoncrawl import BASE, FORMATS, crawl_files, parse_files
from quern.data_pipeline.sources.containers.ranges import FileRange, cut
from quern.data_pipeline.sources.tree import CODE_SUFFIXES, TEXT_SUFFIXES, left_out, list_tree
from quern.errors import InputError

__all__ = ["NOT_DECIDING", "TREE_KINDS", "InputFile", "Partition", "SourceConfig", "plan"]

log = logging.getLogger(__name__)

Kind = Literal["warc", "wet", "jsonl", "parquet", "text", "code", "commoncrawl"]
TREE_KINDS = ("text", "code")
RECORD_KINDS = ("jsonl", "parquet")
CRAWL_KIND = ("commoncrawl",)
RANGE_KINDS = ("warc", "wet", *CRAWL_KIND)
#: Fields that change no row of a source's pages, wherever and in whatever pieces its files are read.
NOT_DECIDING = ("paths", "root", "priority", "split_bytes", "crawl", "files", "base", "format", "allow_empty")
_GLOB = re.compile(r"[*?\[]")


class SourceConfig(Section):
    """One item of ``sources``: what to read, and how its pages are named."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100)
    """Name of the source, of its folders and of its tokens: ``RUN/tokens/NAME``. Example: web"""
    kind: Kind
    """What the files are; ``commoncrawl`` reads a crawl by its name. Example: warc"""
    paths: str | list[str] = ""
    """A path, a glob (``**`` too) or a list of them, local or fsspec URLs; a folder for kinds ``text`` and ``code``.
    Example: crawl/*.warc.gz"""
    crawl: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    """Kind ``commoncrawl``, instead of ``paths``: the crawl's name. Example: CC-MAIN-2026-30"""
    files: str | None = None
    """Kind ``commoncrawl``: which files of the crawl, by their line in its list from 0; null = all. Example:
    0-99,200"""
    base: str | None = None
    """Kind ``commoncrawl``: where crawls are stored; null = ``https://data.commoncrawl.org``. Example:
    s3://commoncrawl"""
    format: Literal["warc", "wet"] | None = None
    """Kind ``commoncrawl``: pages (``warc``, also null) or texts extracted by Common Crawl (``wet``). Example: wet"""
    root: str | None = None
    """Relative paths, and so the identities of pages, start below this folder instead of the entry's own. Example:
    crawl/"""
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    """Of two duplicates the one of the source with the higher priority is kept."""
    max_bytes: int = Field(default=32 << 20, ge=1)
    """[bytes] A larger payload, line or file (decoded) is not read; its page fails with ``read.too_large``."""
    split_bytes: int = Field(default=256 << 20, ge=1024)
    """[bytes] WARC and WET: a larger file (as stored) is read in ranges of this size, each a partition of its own."""

    later: ClassVar[Mapping[str, Any]] = {"allow_empty": False}
    allow_empty: bool = False
    """Let a run succeed although not one record of this source could be read."""

    text_field: str = Field(default="text", min_length=1)
    """JSONL and Parquet: the field that has the text."""
    id_field: str | None = "id"
    """JSONL and Parquet: the field of the ``record_id``, where present; null = none."""
    url_field: str | None = "url"
    """JSONL and Parquet: the field of the URL, where present; null = none."""
    date_field: str | None = "date"
    """JSONL and Parquet: the field of the date: ISO 8601 or RFC 2822 text, a timestamp, or seconds (or milliseconds)
    since 1970, as digits in a text too; null = none."""

    suffixes: list[str] | None = None
    """Kinds ``text`` and ``code``: which file names are read; null = the kind's own list. Example: [.md, .rst]"""
    groups: int = Field(default=16, ge=1, le=65_536)
    """[partitions] Kinds ``text`` and ``code``: the number of partitions over which the files are spread, by a hash of
    their path."""

    @field_validator("paths")
    @classmethod
    def _some_paths(cls, paths: str | list[str]) -> str | list[str]:
        entries = [paths] if isinstance(paths, str) else paths
        if paths == "":  # left out: kind commoncrawl has none, the others are told so below
            return paths
        if not entries or not all(entry.strip() for entry in entries):
            raise ValueError(f"expected at least one path and no empty one, got {paths!r}")
        return paths

    @field_validator("files")
    @classmethod
    def _some_files(cls, files: str | None) -> str | None:
        if files is not None:
            parse_files(files)
        return files

    @field_validator("suffixes")
    @classmethod
    def _dotted(cls, suffixes: list[str] | None) -> list[str] | None:
        if suffixes is not None and (not suffixes or not all(re.fullmatch(r"\.[^/\s]+", one) for one in suffixes)):
            raise ValueError(f'expected suffixes with their dot, such as [".py", ".pyi"], got {suffixes!r}')
        return suffixes

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> SourceConfig:
        foreign = {
            **dict.fromkeys(("text_field", "id_field", "url_field", "date_field"), RECORD_KINDS),
            **dict.fromkeys(("suffixes", "groups"), TREE_KINDS),
            "split_bytes": RANGE_KINDS,
            **dict.fromkeys(("crawl", "files", "base", "format"), CRAWL_KIND),
        }
        for field, kinds in foreign.items():
            if self.kind not in kinds and getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field}: expected only with kind {' or '.join(kinds)}, got kind {self.kind}")
        if self.kind == "commoncrawl":
            if self.crawl is None:
                raise ValueError("crawl: expected the name of a crawl, such as CC-MAIN-2026-30, got nothing")
            if self.paths != "" or self.root is not None:
                raise ValueError("paths: expected crawl, and files, instead with kind commoncrawl")
        elif self.paths == "":
            raise ValueError("paths: expected at least one path, got nothing")
        return self

    @property
    def entries(self) -> tuple[str, ...]:
        return (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)


@dataclass(frozen=True)
class InputFile:
    """One file as planned. ``fingerprint`` changes when its content may have changed; ``size`` is in bytes."""

    path: str
    relative_path: str
    fingerprint: str
    size: int


@dataclass(frozen=True)
class Partition:
    """A unit of work and of commit: one file, a range of a large one, or a fixed group of a tree's files."""

    source: str
    name: str
    files: tuple[InputFile, ...]
    range: FileRange | None = None

    @property
    def undivided(self) -> str:
        """The name of the partition this is a range of; its own where it is none."""
        return self.name if self.range is None else self.name.removesuffix(f"-{self.range.name}")

    @property
    def size(self) -> int:
        """Bytes of input as stored."""
        if self.range is not None:
            return self.range.end - self.range.start
        return sum(file.size for file in self.files)


def plan(source: SourceConfig) -> list[Partition]:
    """The partitions of ``source``, sorted by name; file listing only, no file is opened.

    Raises:
        InputError: an entry matches nothing, a file lies outside ``root``, a file is listed twice, or two files have
            the same relative path (both are named).
    """
    if source.kind == "commoncrawl":
        assert source.crawl is not None
        form = source.format or FORMATS[0]
        found_files = crawl_files(source.name, source.crawl, source.base or BASE, form, source.files)
        return _planned(source, {relative: path for path, relative in found_files})
    by_path: dict[str, tuple[str, str]] = {}
    by_relative: dict[str, str] = {}
    for entry in sorted(source.entries):
        found = 0
        for path, relative in _expand(source, entry):
            found += 1
            if path in by_path:
                first = by_path[path][1]
                listed = f"by {entry!r}" if first == entry else f"by {first!r} and by {entry!r}"
                raise InputError(f"source {source.name}: {path}: listed twice, {listed}; list it once")
            if relative in by_relative:
                raise InputError(
                    f"source {source.name}: {by_relative[relative]} and {path} have the same relative path "
                    f"{relative!r}, so their pages would have the same ids; set root or use one glob above both"
                )
            by_path[path] = (relative, entry)
            by_relative[relative] = path
        if not found:
            raise InputError(f"source {source.name}: {entry}: matches no file{_wanted(source, entry)}")
    return _planned(source, by_relative)


def _planned(source: SourceConfig, by_relative: dict[str, str]) -> list[Partition]:
    ordered = sorted(by_relative.items())
    described = storage.describe([path for _, path in ordered])
    files = [
        InputFile(path, relative, fingerprint, size)
        for (relative, path), (size, fingerprint) in zip(ordered, described, strict=True)
    ]
    return sorted(_partitions(source, files), key=lambda partition: partition.name)


def _wanted(source: SourceConfig, entry: str) -> str:
    if source.kind not in TREE_KINDS:
        return ""
    if not storage.exists(_normal(entry)) and not glob.has_magic(entry):
        return ": there is no such file or folder"
    names = suffixes_of(source)
    told = " with a suffix of " + " ".join(names[:12]) + (" …" if len(names) > 12 else "")
    why = left_out(_normal(entry), names) if storage.is_folder(_normal(entry)) else None
    return f"{told}; {why}" if why else told


def suffixes_of(source: SourceConfig) -> tuple[str, ...]:
    """The file name endings a tree source reads."""
    if source.suffixes is not None:
        return tuple(source.suffixes)
    return CODE_SUFFIXES if source.kind == "code" else TEXT_SUFFIXES


def _expand(source: SourceConfig, entry: str) -> Iterator[tuple[str, str]]:
    """Every file of one entry as (path, relative path)."""
    given, entry = entry, _normal(entry)
    fs, inner = storage.split(entry)
    is_tree = source.kind in TREE_KINDS
    pattern = _GLOB.search(entry) is not None and not storage.exists(entry)
    if pattern:
        base = entry[: _GLOB.search(entry).start()].rpartition("/")[0]  # type: ignore[union-attr]
        base = storage.split(base)[1] if base else ("/" if entry.startswith("/") else storage.split(".")[1])
        paths = storage.glob(entry)
        if is_tree:
            paths = [path for path in paths if path.endswith(suffixes_of(source))]
    elif storage.is_folder(entry):
        if not is_tree:
            raise InputError(
                f"source {source.name}: {given}: is a folder; kind {source.kind} expects files or a glob, "
                f"for example {given.rstrip('/')}/*"
            )
        base, paths = inner, list_tree(entry, suffixes_of(source))
    else:
        if not storage.exists(entry):
            return
        if isinstance(fs, LocalFileSystem) and (kind := _special(inner)) is not None:
            raise InputError(f"source {source.name}: {given}: is a {kind}; expected a regular file")
        base, paths = inner.rpartition("/")[0], [entry if "://" in entry else inner]
    if isinstance(fs, LocalFileSystem):
        paths = _regular(source, paths)
    if source.root is not None:
        base = storage.split(_normal(source.root))[1]
    prefix = base.rstrip("/") + "/"
    for path in paths:
        place = str(fs._strip_protocol(path))
        if not place.startswith(prefix):
            raise InputError(f"source {source.name}: {path}: lies outside root {source.root!r}")
        relative = place[len(prefix) :]
        if is_tree and pattern and any(part.startswith(".") for part in relative.split("/")):
            continue
        yield path, relative


_SPECIAL = (
    (stat.S_ISFIFO, "named pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "character device"),
    (stat.S_ISBLK, "block device"),
)
_NAMED = 5


def _special(path: str) -> str | None:
    """What a local path is where reading it might never end; None for files, folders and what is not there."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return None
    return next((name for is_one, name in _SPECIAL if is_one(mode)), None)


def _regular(source: SourceConfig, paths: list[str]) -> list[str]:
    """Those that are no pipe, socket or device, and whose name is text; the others are named in a warning."""
    others = {path: f"a {kind}" for path in paths if (kind := _special(path)) is not None}
    others |= {path: "its name is not UTF-8" for path in paths if re.search("[\ud800-\udfff]", path)}
    if others:
        named = ", ".join(f"{path} ({why})" for path, why in sorted(others.items())[:_NAMED])
        more = f" and {len(others) - _NAMED:,} more" if len(others) > _NAMED else ""
        log.warning("source %s: not read: %s%s", source.name, named.encode(errors="backslashreplace").decode(), more)
    return [path for path in paths if path not in others]


def _normal(entry: str) -> str:
    """A local entry as an absolute path, without ``file://``, and ``.``, ``..`` and ``//`` before a glob character.

    Else a file that two entries spell differently would be two files. Entries on other stores stay as they are.
    """
    fs, inner = storage.split(entry)
    glob = _GLOB.search(entry)
    if not isinstance(fs, LocalFileSystem):
        return entry
    head = entry if glob is None or fs.exists(inner) else entry[: entry.rfind("/", 0, glob.start()) + 1]
    place = storage.split(head or ".")[1]
    plain = "/" + posixpath.normpath(place).lstrip("/")
    if not os.path.exists(place) or not os.path.exists(plain) or not os.path.samefile(place, plain):
        return entry  # missing, or a link stands before a ``..``
    return posixpath.join(plain, entry[len(head) :]).rstrip("/")


def _partitions(source: SourceConfig, files: list[InputFile]) -> Iterator[Partition]:
    if source.kind not in TREE_KINDS:
        for file in files:
            name = partition_name(file.relative_path)
            if source.kind not in RANGE_KINDS or file.size <= source.split_bytes:
                yield Partition(source.name, name, (file,))
                continue
            for part in cut(file.size, source.split_bytes):
                yield Partition(source.name, f"{name}-{part.name}", (file,), part)
        return
    grouped: dict[int, list[InputFile]] = {}
    for file in files:
        grouped.setdefault(int(_path_hash(file.relative_path), 16) % source.groups, []).append(file)
    for group, members in grouped.items():
        yield Partition(source.name, f"files-{group:05d}-of-{source.groups:05d}", tuple(members))


def partition_name(relative_path: str) -> str:
    """A file name for the partition of one input file: readable, unique, at most 89 ASCII characters."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", relative_path)[-80:].lstrip(".-")
    return f"{readable or 'file'}-{_path_hash(relative_path)[:8]}"


def _path_hash(relative_path: str) -> str:
    return hashlib.blake2b(relative_path.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
