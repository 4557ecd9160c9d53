"""What ``manifest.json`` holds, and that nothing else passes for one."""

from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.config import digest
from quern.errors import InputError
from quern.train.checkpoint.format.manifest import (
    FileRecord,
    Manifest,
    check_files,
    list_checkpoints,
    read_manifest,
    sha256_of,
)
from support.train import tier_case
from support.train.tier_case import SHA


def manifest(**changes) -> Manifest:
    files = {".metadata": FileRecord(SHA, 10), "__0_0.distcp": FileRecord(SHA, 1 << 40)}
    fields = {
        "data_step": 1010, "ledger_offset": 77, "corpus_versions": {"r/web/1": 3}, "scalars": {"scale": 0.5},
        "written_by": {"torch": "2.11.0"}, "files": files,
    }  # fmt: skip
    return tier_case.manifest(1000, **(fields | changes))


def signed(data: dict) -> dict:
    data.pop("checksum", None)
    return data | {"checksum": digest(data)}


def changed(place: str, value) -> dict:
    """The manifest as JSON with one field replaced (or, for ..., removed), and a right checksum."""
    data = json.loads(manifest().to_bytes())
    *parents, last = place.split("/")
    inside = data
    for parent in parents:
        inside = inside[parent]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return signed(data)


@pytest.mark.slow
@given(
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.floats()),
    st.integers(min_value=0),
    st.dictionaries(st.text(), st.integers(min_value=0)),
)
def test_to_dict_and_back_through_strict_json(scalars, tokens, versions):
    before = manifest(scalars=scalars, tokens=tokens, corpus_versions=versions)
    text = json.dumps(before.to_dict(), allow_nan=False)
    after = Manifest.from_dict(json.loads(text))
    assert list(after.scalars) == list(scalars)
    for name, value in scalars.items():
        found = after.scalars[name]
        assert type(found) is type(value)
        assert found == value or (math.isnan(found) and math.isnan(value))
    assert vars(after) | {"scalars": 0} == vars(before) | {"scalars": 0}


def test_a_manifest_without_an_encoding():
    assert Manifest.from_dict(manifest(encoding=None, optimizer=False).to_dict()).encoding is None


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("schema", 2, r"schema: expected 1 .*got 2"),
        ("schema", ..., r"schema: missing"),
        ("step", -1, r"step: expected an integer ≥ 0, got -1"),
        ("step", True, r"step: expected an integer ≥ 0, got True"),
        ("step", "1000", r"step: expected an integer ≥ 0, got '1000'"),
        ("tokens", 1.5, r"tokens: expected an integer ≥ 0, got 1.5"),
        ("data_step", ..., r"data_step: missing"),
        ("ledger_offset", None, r"ledger_offset: expected an integer"),
        ("model/dim", 0, r"model\.dim: "),
        ("model/surprise", 1, r"model\.surprise: "),
        ("model/vocab_size", ..., r"model\.vocab_size: "),
        ("layout", [4], r"layout: expected a JSON object, got \[4\]"),
        ("layout/dp_shard", "4", r"layout\.dp_shard: expected an integer"),
        ("precision", 16, r"precision: expected a text, got 16"),
        ("order", ..., r"order: missing"),
        ("corpus", None, r"corpus: expected a JSON object"),
        ("corpus/versions", 3, r"corpus\.versions: expected a JSON object"),
        ("corpus/versions/r~web", "new", r"corpus\.versions\.r~web: expected an integer"),
        ("corpus/fingerprint", 1, r"corpus\.fingerprint: expected a text"),
        ("encoding/eot_id", None, r"encoding\.eot_id: expected an integer"),
        ("encoding/ranks_sha256", "xyz", r"encoding\.ranks_sha256: expected 64 hex digits"),
        ("encoding", ..., r"encoding: missing"),
        ("config_digest", 5, r"config_digest: expected a text"),
        ("optimizer", 1, r"optimizer: expected true or false, got 1"),
        ("scalars/scale", "big", r"scalars\.scale: expected a number"),
        ("scalars/scale", [1], r"scalars\.scale: expected a number"),
        ("written_by/torch", 2, r"written_by\.torch: expected a text"),
        ("files", {}, r"files: expected '\.metadata' among them"),
        ("files/__0_0.distcp/size", -5, r"files\.__0_0\.distcp\.size: expected an integer"),
        ("files/__0_0.distcp/sha256", SHA.upper(), r"files\.__0_0\.distcp\.sha256: expected 64 hex"),
        ("files/__0_0.distcp", "x", r"files\.__0_0\.distcp: expected a JSON object"),
        ("extra", 1, r"extra: not a field"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(place, value, message):
    with pytest.raises(InputError, match=r"^RUN/manifest\.json: " + message):
        Manifest.from_dict(changed(place, value), name="RUN/manifest.json")


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "a\\b", "", ".", "..", "manifest.json", "nul\0", "\ud800", "\x1b[2J", "a\nb"]
)
def test_files_elsewhere_are_refused(name):
    data = json.loads(manifest().to_bytes())
    data["files"][name] = {"sha256": SHA, "size": 1}
    with pytest.raises(InputError, match=r"(?s)files.*expected the plain name of a file beside it"):
        Manifest.from_dict(data)  # names are looked at before the checksum


def test_half_of_a_character_is_one_line():
    data = json.loads(manifest().to_bytes())
    with pytest.raises(InputError, match="expected text, got half of a character"):
        Manifest.from_dict(data | {"order": "\ud800"})


@pytest.mark.parametrize("value", [[], 3, None, "x", {}, {"weight_map": {}}])
def test_foreign_json_is_refused(value):
    with pytest.raises(InputError, match=r"manifest\.json: "):
        Manifest.from_dict(value)


def test_every_altered_digit_is_found(tmp_path):
    """Each digit and letter of the values changed in turn: none reads as another manifest."""
    folder = tmp_path / "step_00001000"
    folder.mkdir()
    data = manifest().to_bytes()
    (folder / "manifest.json").write_bytes(data)
    original = read_manifest(str(folder))
    tried = 0
    for place in range(len(data)):
        if not chr(data[place]).isalnum():
            continue
        altered = bytearray(data)
        altered[place] = ord("7") if data[place] != ord("7") else ord("8")
        (folder / "manifest.json").write_bytes(altered)
        tried += 1
        with pytest.raises(InputError, match=r"manifest\.json"):
            read_manifest(str(folder))
    assert tried > 500
    (folder / "manifest.json").write_bytes(data)
    assert read_manifest(str(folder)) == original


def test_the_folders_name_and_the_step_agree(tmp_path):
    for name in ("step_00001001", "step_00001000", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_bytes(manifest().to_bytes())
    assert read_manifest(str(tmp_path / "step_00001000")).step == 1000
    assert read_manifest(str(tmp_path / "elsewhere") + "/").step == 1000
    with pytest.raises(InputError, match="step: expected 1001"):
        read_manifest(str(tmp_path / "step_00001001"))
    with pytest.raises(InputError, match="no such file"):
        read_manifest(str(tmp_path))


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path):
    run = str(tmp_path)
    assert list_checkpoints(run) == []
    root = tmp_path / "checkpoints"
    for name in ("step_00000020", "step_00000003", "step_123456789", f".step_00000004.{'0' * 32}.tmp", "step_7",
                 "step_000000001", "step_0000000x", f".step_00000005.{'0' * 32}.replaced", "other"):  # fmt: skip
        (root / name).mkdir(parents=True)
    (root / "step_00000009").write_text("a file")
    found = list_checkpoints(run)
    assert [checkpoint.step for checkpoint in found] == [3, 20, 123456789]
    assert found[0].path == os.path.join(run, "checkpoints", "step_00000003")


def test_files_are_compared_by_presence_size_and_hash(tmp_path):
    contents = {"a": b"1234", "b": b"5678", "c": b"", ".metadata": b"m"}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    this = manifest(files={name: FileRecord(sha256_of(data), len(data)) for name, data in contents.items()})
    folder = str(tmp_path)
    assert check_files(folder, this, hashes=True) == []
    (tmp_path / "a").write_bytes(b"1235")
    (tmp_path / "b").write_bytes(b"56789")
    (tmp_path / "c").unlink()
    assert [os.path.basename(problem.file) for problem in check_files(folder, this, hashes=False)] == ["b", "c"]
    problems = check_files(folder, this, hashes=True)
    assert [os.path.basename(problem.file) for problem in problems] == ["a", "b", "c"]
    assert [problem.what.split()[0] for problem in problems] == ["expected", "expected", "missing"]
    assert check_files(folder, this, hashes=True, mine=lambda name: name == ".metadata") == []
    (tmp_path / "c").mkdir()
    assert str(check_files(folder, this, hashes=True)[2]) == f"{folder}/c: not a file"
