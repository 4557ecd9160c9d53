"""``places.json``: what is read is what was written, and what is damaged is refused with its file and field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quern.errors import InputError
from quern.train.checkpoint.format.file_locations import (
    Place,
    beside,
    check_together,
    elsewhere,
    in_order,
    places_to_bytes,
    read_places,
)

NODE: dict[str, Any] = {"host": "h0", "folder": "/nvme/0/ab/step_00000003", "files": ["__0_0.distcp", "__1_0.distcp"]}
OTHER: dict[str, Any] = {"host": "h1", "folder": "/nvme/0/ab/step_00000003", "files": ["__1_0.distcp"]}


def put(folder: Path, value: Any) -> str:
    (folder / "places.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return str(folder)


def test_a_hand_written_file_is_read(tmp_path: Path) -> None:
    folder = put(tmp_path, {"schema": 1, "nodes": [NODE, OTHER]})
    first = Place("h0", "/nvme/0/ab/step_00000003", ("__0_0.distcp", "__1_0.distcp"))
    second = Place("h1", "/nvme/0/ab/step_00000003", ("__1_0.distcp",))
    assert read_places(folder) == (first, second)
    assert elsewhere(folder) == {"__0_0.distcp", "__1_0.distcp"}
    mine = beside(folder)
    assert [name for name in (".metadata", "__0_0.distcp", "__7_0.distcp") if mine(name)] == [
        ".metadata", "__7_0.distcp",
    ]  # fmt: skip
    assert in_order((second, first), "__0_0.distcp") == [first, second]
    assert in_order((second, first), "__1_0.distcp") == [second, first]


def test_without_the_file_everything_lies_beside_the_manifest(tmp_path: Path) -> None:
    assert read_places(str(tmp_path)) is None
    assert elsewhere(str(tmp_path)) == frozenset()
    assert beside(str(tmp_path))("__0_0.distcp")
    check_together(str(tmp_path))


def test_what_is_written_is_plain_json_and_is_read_again(tmp_path: Path) -> None:
    places = [
        Place("h1", "/b/./x/", ("__3_0.distcp", "__2_0.distcp")),
        Place("h0", "/a", ("__0_0.distcp",)),
        Place("h1", "/b/x", ("__4_0.distcp", "__3_0.distcp")),
        Place("h2", "/c", ()),
    ]
    data = places_to_bytes(places)
    assert json.loads(data) == {
        "schema": 1,
        "nodes": [
            {"host": "h1", "folder": "/b/x", "files": ["__2_0.distcp", "__3_0.distcp", "__4_0.distcp"]},
            {"host": "h0", "folder": "/a", "files": ["__0_0.distcp"]},
            {"host": "h2", "folder": "/c", "files": []},
        ],
    }
    assert data.endswith(b"}\n")
    read = read_places(put(tmp_path, data.decode()))
    assert [(place.host, place.folder) for place in read or ()] == [("h1", "/b/x"), ("h0", "/a"), ("h2", "/c")]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"host": ""}, "nodes.1.host: expected a node's name, got ''"),
        ({"host": 7}, "nodes.1.host"),
        ({"folder": "nvme/x"}, "nodes.1.folder: expected an absolute path, got 'nvme/x'"),
        ({"folder": ""}, "nodes.1.folder"),
        ({"folder": None}, "nodes.1.folder"),
        ({"folder": "/nvme/../etc"}, "nodes.1.folder"),
        ({"folder": "/nvme\0"}, "nodes.1.folder"),
        ({"folder": "/nvme/\ud800"}, "nodes.1.folder"),
        ({"folder": NODE["folder"], "host": "h0"}, "nodes.1: h0, /nvme/0/ab/step_00000003: expected each folder once"),
        ({"files": "__0_0.distcp"}, "nodes.1.files: expected a list"),
        ({"files": {"__0_0.distcp": 1}}, "nodes.1.files"),
        ({"files": ["__0_0.distcp", 3]}, "nodes.1.files.1: expected the plain name of a file, got 3"),
        ({"files": ["a/b"]}, "nodes.1.files.0: expected the plain name of a file, got 'a/b'"),
        ({"files": ["a\\b"]}, "nodes.1.files.0"),
        ({"files": ["a\0b"]}, "nodes.1.files.0"),
        ({"files": ["a\ud800"]}, "nodes.1.files.0"),
        ({"files": [".."]}, "nodes.1.files.0"),
        ({"files": [""]}, "nodes.1.files.0"),
        ({"files": ["x", ".metadata"]}, "nodes.1.files.1: expected a file of tensors, got '.metadata'"),
        ({"files": ["manifest.json"]}, "nodes.1.files.0: expected a file of tensors"),
        ({"files": ["places.json"]}, "nodes.1.files.0: expected a file of tensors"),
        ({"files": ["x", "y", "x"]}, "nodes.1.files.2: expected each name once, got 'x'"),
        ({"more": 1}, "nodes.1.more: not a field"),
    ],
)
def test_a_damaged_node_is_refused_by_its_field(tmp_path: Path, changes: dict[str, Any], field: str) -> None:
    folder = put(tmp_path, {"schema": 1, "nodes": [NODE, OTHER | changes]})
    for read in (read_places, elsewhere, beside, check_together):
        with pytest.raises(InputError) as caught:
            read(folder)  # type: ignore[operator]
        assert str(caught.value).startswith(f"{folder}/places.json: {field}")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["host", "folder", "files"])
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    node = {key: value for key, value in NODE.items() if key != missing}
    with pytest.raises(InputError, match=rf"places\.json: nodes\.0\.{missing}: missing$"):
        read_places(put(tmp_path, {"schema": 1, "nodes": [node]}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ('{"schema": 1, "nodes": [', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected a JSON object, got []"),
        ({"nodes": [NODE]}, "schema: missing"),
        ({"schema": 1}, "nodes: missing"),
        ({"schema": 2, "nodes": [NODE]}, "schema: expected 1 (this version of quern reads no other), got 2"),
        ({"schema": True, "nodes": [NODE]}, "schema: expected 1"),
        ({"schema": "1", "nodes": [NODE]}, "schema: expected 1"),
        ({"schema": 1, "nodes": []}, "nodes: expected a list of at least one, got []"),
        ({"schema": 1, "nodes": NODE}, "nodes: expected a list"),
        ({"schema": 1, "nodes": ["h0"]}, "nodes.0: expected a JSON object, got 'h0'"),
        ({"schema": 1, "nodes": [NODE], "run": "x"}, "run: not a field of places.json"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    folder = put(tmp_path, content)
    with pytest.raises(InputError) as caught:
        read_places(folder)
    assert str(caught.value).startswith(f"{folder}/places.json: {message}")


def test_a_folder_or_a_link_to_nothing_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / "places.json").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    os.symlink(tmp_path / "none", tmp_path / "b" / "places.json")
    for name in ("a", "b"):
        with pytest.raises(InputError, match=rf"/{name}/places\.json: "):
            read_places(str(tmp_path / name))


@pytest.mark.parametrize(
    "places", [[], [Place("h0", "nvme", ())], [Place("", "/nvme", ())], [Place("h0", "/nvme", ("a/b",))]]
)
def test_what_could_not_be_read_is_not_written(places: list[Place]) -> None:
    with pytest.raises(ValueError, match="nodes"):
        places_to_bytes(places)


def test_files_that_are_not_together_are_said_with_their_nodes(tmp_path: Path) -> None:
    folder = put(tmp_path, {"schema": 1, "nodes": [NODE, OTHER]})
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(InputError, match="1 file of tensors are on the run's nodes") as caught:
        check_together(folder)
    assert "h0:/nvme/0/ab/step_00000003, h1:/nvme/0/ab/step_00000003" in str(caught.value)
    assert "quern checkpoint fetch" in str(caught.value)
    (tmp_path / "__1_0.distcp").write_bytes(b"")
    check_together(folder)
