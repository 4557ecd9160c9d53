"""The manifest of a checkpoint, ``manifest.json``. Imports no torch, so that listing and verifying stay cheap.

A checkpoint is a folder ``RUN/checkpoints/step_00001000/`` with DCP's files of tensors (or ``places.json``, which says
on which nodes they are), DCP's ``.metadata``, the resolved ``config.yaml``, the encoding's ranks file, the run's ledger
so far and the manifest, which is written last and names every other file with its SHA-256 and size. ``step`` counts
completed optimizer steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from quern import storage
from quern.config import digest
from quern.errors import InputError
from quern.model.config import ModelShape
from quern.words import is_plain_name

__all__ = [
    "CONFIG_FILE", "ENCODING_FILE", "HISTORY_FILE", "MANIFEST_FILE", "METADATA_FILE", "MISSING", "Checkpoint",
    "EncodingInfo", "Fields", "FileRecord", "Manifest", "Position", "Problem", "RunFacts", "as_json", "check_file",
    "check_files", "checkpoint_name", "checkpoints_folder", "is_tensor_file", "list_checkpoints", "read_manifest",
    "sha256_of",
]  # fmt: skip

SCHEMA = 1
MANIFEST_FILE = "manifest.json"
METADATA_FILE = ".metadata"
MISSING = "missing"
CONFIG_FILE = "config.yaml"
ENCODING_FILE = "encoding.tiktoken"
HISTORY_FILE = "ledger.jsonl"
"""The run's ledger up to the checkpoint."""

_NAME = re.compile(r"step_(\d{8,})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}  # JSON has no numbers for these

Scalar = int | float | bool | None


def checkpoints_folder(run_dir: str) -> str:
    """Where a run keeps its checkpoints."""
    return os.path.join(run_dir, "checkpoints")


def checkpoint_name(step: int) -> str:
    """The folder's name of the checkpoint after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step in a name that is a checkpoint's, of eight digits or more; None for any other."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(run_dir: str) -> list[Checkpoint]:
    """The published checkpoints of a run by ascending step; nothing of them is opened or verified."""
    try:
        names = os.listdir(checkpoints_folder(run_dir))
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in names:
        step, path = step_of(name), os.path.join(checkpoints_folder(run_dir), name)
        if step is not None and checkpoint_name(step) == name and os.path.isdir(path):
            found.append(Checkpoint(step, path))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def read_manifest(path: str) -> Manifest:
    """The manifest of the checkpoint at ``path``; a missing, damaged or foreign one is an :class:`InputError`."""
    file = os.path.join(path, MANIFEST_FILE)
    manifest = Manifest.from_dict(storage.read_json(file), name=file)
    manifest.check_step(step_of(os.path.basename(os.path.normpath(path))), file)
    return manifest


def check_files(
    path: str, manifest: Manifest, *, hashes: bool, mine: Callable[[str], bool] = lambda name: True
) -> list[Problem]:
    """The problems with the files of the checkpoint at ``path``, in the manifest's order; empty if none.

    ``hashes`` compares SHA-256 besides presence and size; ``mine`` selects the files to look at.
    """
    looks = (check_file(path, name, record, hashes=hashes) for name, record in manifest.files.items() if mine(name))
    return [problem for problem in looks if problem is not None]


def is_tensor_file(name: str) -> bool:
    """Whether a file of a checkpoint is one of those that ranks write, ``__<rank>_<number>.distcp``."""
    return name.endswith(".distcp")


def check_file(folder: str, name: str, record: FileRecord, *, hashes: bool) -> Problem | None:
    """The problem with one file, if any."""
    file = os.path.join(folder, name)
    try:
        size = os.stat(file).st_size
        if not os.path.isfile(file):
            return Problem(file, "not a file")
        if size != record.size:
            return Problem(file, f"expected {record.size} bytes, has {size}")
        if hashes and (sha256 := storage.sha256(file)) != record.sha256:
            return Problem(file, f"expected SHA-256 {record.sha256}, has {sha256}")
    except FileNotFoundError:
        return Problem(file, MISSING)
    except OSError as error:
        return Problem(file, f"cannot be read ({error.strerror or error})")
    return None


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint folder."""

    step: int
    path: str

    @property
    def name(self) -> str:
        """``step_00001000``."""
        return os.path.basename(self.path)


@dataclass(frozen=True)
class Problem:
    """Why a checkpoint cannot be used."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


@dataclass(frozen=True)
class FileRecord:
    """The expected size and checksum of a file of the checkpoint."""

    sha256: str
    size: int


@dataclass(frozen=True)
class EncodingInfo:
    """The encoding to whose ids the embedding's rows belong."""

    name: str
    vocab_size: int
    eot_id: int
    ranks_sha256: str
    """SHA-256 of the ranks file, which lies in the checkpoint as ``encoding.tiktoken``."""


@dataclass(frozen=True)
class Position:
    """The position of a run after a step."""

    data_step: int
    """The next data step."""
    tokens: int
    """Tokens read so far."""
    order: str
    """Hash of the order in force."""
    ledger_offset: int
    """Bytes of ``ledger.jsonl`` that were written before the checkpoint."""
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    """Small replicated state that is no tensor, of the guard or the loss scale."""


@dataclass(frozen=True)
class RunFacts:
    """Facts that every checkpoint of a run records besides its position."""

    shape: ModelShape
    layout: Mapping[str, int]
    """Mesh sizes by axis; for the record only, any layout loads any checkpoint."""
    precision: str
    corpus_versions: Mapping[str, int]
    """Corpus version by source id."""
    corpus_fingerprint: str
    encoding: EncodingInfo
    ranks_path: str
    """The ranks file to copy."""
    config: Mapping[str, Any]
    """The resolved config as plain JSON."""


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``."""

    step: int
    data_step: int
    tokens: int
    model: ModelShape
    layout: Mapping[str, int]
    precision: str
    """Compute precision of the run; of a weights-only checkpoint, the stored type's name."""
    order: str
    ledger_offset: int
    corpus_versions: Mapping[str, int]
    corpus_fingerprint: str
    encoding: EncodingInfo | None
    """None: weights whose encoding is not known."""
    config_digest: str
    optimizer: bool
    """False: weights only."""
    scalars: Mapping[str, Scalar]
    written_by: Mapping[str, str]
    """Versions of the software."""
    files: Mapping[str, FileRecord]
    run: str = ""
    """Of which run, by its random id; empty: not a run's."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, with a checksum over itself: a digit that flips is found."""
        encoding = self.encoding
        plain = {name: value for name, value in vars(self).items() if not name.startswith("corpus_")} | {
            "schema": SCHEMA,
            "model": self.model.model_dump(mode="json"),
            "layout": dict(self.layout),
            "corpus": {"versions": dict(self.corpus_versions), "fingerprint": self.corpus_fingerprint},
            "encoding": None if encoding is None else dict(vars(encoding)),
            "scalars": {name: as_json(value) for name, value in self.scalars.items()},
            "written_by": dict(self.written_by),
            "files": {name: {"sha256": file.sha256, "size": file.size} for name, file in sorted(self.files.items())},
        }
        return plain | {"checksum": digest(plain)}

    def check_step(self, named: int | None, name: str) -> None:
        """Raise :class:`InputError` where the folder of this manifest, ``name``, names another step."""
        if named is not None and named != self.step:
            raise InputError(f"{name}: step: expected {named}, as the folder's name says, got {self.step}")

    def to_bytes(self) -> bytes:
        """The file's bytes."""
        return (json.dumps(self.to_dict(), sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_dict(cls, data: Any, *, name: str = MANIFEST_FILE) -> Manifest:
        """The inverse of :meth:`to_dict`.

        Raises:
            InputError: naming ``name``, the field, what it holds and what was expected.
        """
        fields = Fields(name, "", data)
        schema = fields.integer("schema")
        if schema != SCHEMA:
            raise fields.wrong("schema", f"{SCHEMA} (this version of quern reads no other)", schema)
        corpus = fields.child("corpus")
        manifest = cls(
            step=fields.integer("step"),
            data_step=fields.integer("data_step"),
            tokens=fields.integer("tokens"),
            model=fields.shape("model"),
            layout=fields.child("layout").integers(),
            precision=fields.text("precision"),
            order=fields.text("order"),
            ledger_offset=fields.integer("ledger_offset"),
            corpus_versions=corpus.child("versions").integers(),
            corpus_fingerprint=corpus.text("fingerprint"),
            encoding=None if fields.value("encoding") is None else fields.child("encoding").encoding(),
            config_digest=fields.text("config_digest"),
            optimizer=fields.flag("optimizer"),
            scalars=fields.child("scalars").scalars(),
            written_by=fields.child("written_by").texts(),
            files=fields.child("files").files(),
            run=fields.run(),
        )
        checksum = fields.text("checksum")
        try:
            expected = digest({key: value for key, value in data.items() if key != "checksum"})
        except UnicodeEncodeError as error:
            raise InputError(f"{name}: expected text, got half of a character ({error})") from None
        if checksum != expected:
            raise fields.wrong("checksum", f"{expected!r}; the file was damaged or edited", checksum)
        unknown = sorted(set(data) - set(manifest.to_dict()))
        if unknown:
            raise InputError(f"{name}: {unknown[0]}: not a field of a checkpoint's manifest")
        if METADATA_FILE not in manifest.files:
            raise InputError(f"{name}: files: expected {METADATA_FILE!r} among them")
        return manifest


def as_json(value: Scalar) -> Scalar | str:
    """Plain JSON data; a number that JSON cannot express becomes text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Fields:
    """Reads a JSON object of a checkpoint field by field; every error names the file and the field."""

    def __init__(self, name: str, prefix: str, data: Any) -> None:
        self.name, self.prefix, self.data = name, prefix, data
        if not isinstance(data, dict):
            where = f": {prefix.rstrip('.')}" if prefix else ""
            raise InputError(f"{name}{where}: expected a JSON object, got {_show(data)}")

    def wrong(self, key: str, expected: str, got: Any) -> InputError:
        return InputError(f"{self.name}: {self.prefix}{key}: expected {expected}, got {_show(got)}")

    def value(self, key: str) -> Any:
        if key not in self.data:
            raise InputError(f"{self.name}: {self.prefix}{key}: missing")
        return self.data[key]

    def child(self, key: str) -> Fields:
        return Fields(self.name, f"{self.prefix}{key}.", self.value(key))

    def integer(self, key: str) -> int:
        value = self.value(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(key, "an integer ≥ 0", value)
        return value

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a text", value)
        return value

    def run(self) -> str:
        run = self.text("run")
        if run and not re.fullmatch("[0-9a-f]{32}", run):
            raise self.wrong("run", "32 hex digits", run)
        return run

    def flag(self, key: str) -> bool:
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def sha256(self, key: str) -> str:
        value = self.text(key)
        if not _SHA256.fullmatch(value):
            raise self.wrong(key, "64 hex digits", value)
        return value

    def shape(self, key: str) -> ModelShape:
        try:
            return ModelShape.model_validate(self.value(key))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in (key, *first["loc"]))
            raise InputError(f"{self.name}: {self.prefix}{place}: {first['msg']}") from None

    def encoding(self) -> EncodingInfo:
        return EncodingInfo(
            self.text("name"), self.integer("vocab_size"), self.integer("eot_id"), self.sha256("ranks_sha256")
        )

    def integers(self) -> dict[str, int]:
        return {key: self.integer(key) for key in self.data}

    def texts(self) -> dict[str, str]:
        return {key: self.text(key) for key in self.data}

    def scalars(self) -> dict[str, Scalar]:
        found: dict[str, Scalar] = {}
        for key, value in self.data.items():
            if isinstance(value, str) and value in _NON_FINITE:
                found[key] = _NON_FINITE[value]
            elif value is None or isinstance(value, int | float):
                found[key] = value
            else:
                raise self.wrong(key, "a number, true, false or null", value)
        return found

    def files(self) -> dict[str, FileRecord]:
        found = {}
        for key in self.data:
            if key == MANIFEST_FILE or not is_plain_name(key):
                raise InputError(f"{self.name}: {self.prefix}{key}: expected the plain name of a file beside it")
            record = self.child(key)
            found[key] = FileRecord(record.sha256("sha256"), record.integer("size"))
        return found


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def sha256_of(data: bytes) -> str:
    """Hex SHA-256 of ``data``."""
    return hashlib.sha256(data).hexdigest()
