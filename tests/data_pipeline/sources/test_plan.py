"""Which files a source has, what they are called for ever, and how they are cut into partitions."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from quern.data_pipeline.page.document import make_doc_id
from quern.data_pipeline.sources import Partition, SourceConfig, plan
from quern.data_pipeline.sources.plan import partition_name
from quern.errors import InputError
from support.named_cases import with_each


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def source(*paths: Path | str, kind: str = "warc", **more: object) -> SourceConfig:
    entries = [str(path) for path in paths]
    return SourceConfig.model_validate(
        {"name": "crawl", "kind": kind, "paths": entries[0] if len(entries) == 1 else entries} | more
    )


def relatives(partitions: list[Partition]) -> list[str]:
    return sorted(file.relative_path for partition in partitions for file in partition.files)


def test_relative_path_is_below_the_folder_before_the_first_glob_character(tmp_path: Path) -> None:
    write(tmp_path, "cc/seg-1/warc/a.warc.gz", "cc/seg-2/warc/a.warc.gz", "cc/other/warc/a.warc.gz")
    assert relatives(plan(source(tmp_path / "cc/seg-*/warc/*.gz"))) == ["seg-1/warc/a.warc.gz", "seg-2/warc/a.warc.gz"]
    assert relatives(plan(source(tmp_path / "cc/**/*.gz"))) == [
        "other/warc/a.warc.gz",
        "seg-1/warc/a.warc.gz",
        "seg-2/warc/a.warc.gz",
    ]


def test_an_entry_without_glob_is_named_by_its_file_name(tmp_path: Path) -> None:
    write(tmp_path, "deep/down/a.warc.gz")
    assert relatives(plan(source(tmp_path / "deep/down/a.warc.gz"))) == ["a.warc.gz"]


def test_a_file_whose_name_holds_a_bracket_is_taken_literally(tmp_path: Path) -> None:
    write(tmp_path, "part[1].warc", "part1.warc")
    assert relatives(plan(source(tmp_path / "part[1].warc"))) == ["part[1].warc"]


def test_root_overrides_the_entry_s_folder(tmp_path: Path) -> None:
    write(tmp_path, "cc/seg-1/a.warc.gz")
    assert relatives(plan(source(tmp_path / "cc/seg-1/a.warc.gz", root=str(tmp_path / "cc")))) == ["seg-1/a.warc.gz"]
    assert relatives(plan(source(tmp_path / "cc/seg-1/*.gz", root=str(tmp_path)))) == ["cc/seg-1/a.warc.gz"]
    with pytest.raises(InputError, match="lies outside root"):
        plan(source(tmp_path / "cc/seg-1/a.warc.gz", root=str(tmp_path / "elsewhere")))


def test_a_relative_entry_gives_the_same_identities_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "in/x/a.warc", "in/b.warc")
    monkeypatch.chdir(tmp_path)
    for relative, absolute in (("in/*/*.warc", tmp_path / "in/*/*.warc"), ("in/b.warc", tmp_path / "in/b.warc")):
        assert plan(source(relative)) == plan(source(absolute))
    monkeypatch.chdir(tmp_path / "in")
    assert relatives(plan(source("*.warc"))) == ["b.warc"]


def test_urls_of_a_store_are_planned_like_paths() -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    for name in ("/bucket/seg/a.warc.gz", "/bucket/seg/b.warc.gz"):
        fs.pipe(name, b"x")
    try:
        partitions = plan(source("memory://bucket/*/*.gz"))
        assert relatives(partitions) == ["seg/a.warc.gz", "seg/b.warc.gz"]
        assert [file.path for p in partitions for file in p.files] == [
            "memory:///bucket/seg/a.warc.gz",
            "memory:///bucket/seg/b.warc.gz",
        ]
        assert all(file.size == 1 for p in partitions for file in p.files)
    finally:
        fs.rm("/bucket", recursive=True)


def test_the_order_of_paths_does_not_matter(tmp_path: Path) -> None:
    write(tmp_path, "a/1.warc", "b/2.warc", "3.warc")
    entries = [tmp_path / "a/*.warc", tmp_path / "b/*.warc", tmp_path / "3.warc"]
    assert plan(source(*entries)) == plan(source(*reversed(entries)))
    assert [partition.name for partition in plan(source(*entries))] == sorted(p.name for p in plan(source(*entries)))


def test_two_files_with_one_relative_path_are_refused_and_both_named(tmp_path: Path) -> None:
    write(tmp_path, "a/1.warc", "b/1.warc")
    with pytest.raises(InputError) as error:
        plan(source(tmp_path / "a/1.warc", tmp_path / "b/1.warc"))
    assert str(tmp_path / "a/1.warc") in str(error.value)
    assert str(tmp_path / "b/1.warc") in str(error.value)


def test_a_file_listed_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a/1.warc")
    for second in (tmp_path / "a/1.warc", tmp_path / "a/*.warc", tmp_path / "*/*.warc"):
        with pytest.raises(InputError, match="listed twice"):
            plan(source(tmp_path / "a/1.warc", second))


def test_a_file_spelled_in_two_ways_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "in/a/1.warc", "here/x")
    monkeypatch.chdir(tmp_path / "here")
    plain = tmp_path / "in/a/1.warc"
    for other in ("../in/*/1.warc", f"{tmp_path}//in/*/1.warc", f"file://{tmp_path}/./in/*/*.warc", "./../in/*/1.warc"):
        assert [file.path for p in plan(source(other)) for file in p.files] == [str(plain)]
        assert relatives(plan(source(other))) == ["a/1.warc"]
        with pytest.raises(InputError, match="listed twice"):
            plan(source(plain, other))
    assert relatives(plan(source("../in//a/1.warc"))) == ["1.warc"]
    assert relatives(plan(source(plain, root="../in/."))) == ["a/1.warc"]
    assert relatives(plan(source("../in/", kind="text", suffixes=[".warc"]))) == ["a/1.warc"]


def test_a_parent_of_a_linked_folder_is_the_link_s_own(tmp_path: Path) -> None:
    write(tmp_path, "far/deep/x", "far/1.warc", "1.warc")
    os.symlink(tmp_path / "far/deep", tmp_path / "link")
    (partition,) = plan(source(f"{tmp_path}/link/../1.warc"))
    assert Path(partition.files[0].path).read_bytes() == b"far/1.warc"


def test_an_entry_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a/1.warc")
    for entry in (tmp_path / "a/*.wet", tmp_path / "none.warc"):
        with pytest.raises(InputError, match=f"source crawl: {re.escape(str(entry))}: matches no file"):
            plan(source(tmp_path / "a/1.warc", entry))
    with pytest.raises(InputError, match="is a folder"):
        plan(source(tmp_path / "a"))


def test_a_changed_file_has_another_fingerprint(tmp_path: Path) -> None:
    write(tmp_path, "1.warc")
    before = plan(source(tmp_path / "*.warc"))[0].files[0]
    os.utime(tmp_path / "1.warc", (1, 1))
    after = plan(source(tmp_path / "*.warc"))[0].files[0]
    assert (before.size, before.path, before.relative_path) == (after.size, after.path, after.relative_path)
    assert before.fingerprint != after.fingerprint
    assert before.size == len("1.warc")


@given(st.text(min_size=1, max_size=300))
def test_partition_names_are_safe_on_any_store(relative_path: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,87}-[0-9a-f]{8}|file-[0-9a-f]{8}", partition_name(relative_path))


def test_partition_names_tell_apart_what_sanitising_makes_equal() -> None:
    names = {partition_name(path) for path in ("a/b", "a-b", "a b", "a//b", "x" * 300 + "1", "x" * 300 + "2", ".a-b")}
    assert len(names) == 7


def test_a_partition_s_name_depends_on_its_file_alone(tmp_path: Path) -> None:
    write(tmp_path, "x/1.warc")
    alone = plan(source(tmp_path / "**/*.warc"))
    write(tmp_path, "x/0.warc", "y/2.warc")
    assert set(alone) < set(plan(source(tmp_path / "**/*.warc")))


def test_a_tree_leaves_out_what_is_hidden_linked_or_of_another_kind(tmp_path: Path) -> None:
    write(tmp_path, "repo/a.py", "repo/pkg/b.py", "repo/.git/c.py", "repo/.hidden.py", "repo/logo.png", "out/d.py")
    os.symlink(tmp_path / "out/d.py", tmp_path / "repo/link.py")
    os.symlink(tmp_path / "repo", tmp_path / "repo/loop")
    assert relatives(plan(source(tmp_path / "repo", kind="code"))) == ["a.py", "pkg/b.py"]
    assert relatives(plan(source(f"{tmp_path}/repo/", kind="code"))) == ["a.py", "pkg/b.py"]
    assert relatives(plan(source(tmp_path / "repo", kind="code", suffixes=[".png"]))) == ["logo.png"]
    with pytest.raises(InputError, match=r"matches no file: there is no such file or folder$"):
        plan(source(tmp_path / "scr", kind="code"))
    with pytest.raises(InputError, match=r"matches no file with a suffix of \.txt \.md \.rst"):
        plan(source(tmp_path / "repo", kind="text"))


def test_a_tree_without_a_file_names_what_was_hidden_or_linked(tmp_path: Path) -> None:
    write(tmp_path, "out/d.py", "out/readme.rst", "hidden/a/.git/c.py", "hidden/.png", "files/b/.a.py", "none/x.png")
    for name, target in (("link/a.py", "out/d.py"), ("folder/out", "out"), ("other/a.png", "out/d.py")):
        (tmp_path / name).parent.mkdir()
        os.symlink(tmp_path / target, tmp_path / name)
    for folder, told in (
        ("link", "link/a.py is a symbolic link, and links are not followed"),
        ("folder", "folder/out is a symbolic link, and links are not followed"),
        ("hidden", "hidden/a/.git is hidden, and hidden files and folders are not read"),
        ("files", "files/b/.a.py is hidden, and hidden files and folders are not read"),
    ):
        with pytest.raises(InputError) as caught:
            plan(source(tmp_path / folder, kind="code"))
        assert str(caught.value).endswith(f" …; {tmp_path}/{told}")
    for folder in ("none", "other"):
        with pytest.raises(InputError, match=r"matches no file with a suffix of .* …$"):
            plan(source(tmp_path / folder, kind="code"))


def test_a_name_that_is_not_utf8_leaves_the_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "in/a.txt", "in/b.txt")
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/in/caf\xe9.txt")
    Path(strange).write_text("a text")
    shown = f"{tmp_path}/in/caf\\udce9.txt"
    for where, kind in ((tmp_path / "in", "text"), (tmp_path / "in" / "*.txt", "jsonl")):
        assert relatives(plan(source(where, kind=kind))) == ["a.txt", "b.txt"]
        assert caplog.records[-1].getMessage() == f"source crawl: not read: {shown} (its name is not UTF-8)"
    with pytest.raises(InputError, match="caf"):
        plan(source(tmp_path / "in" / "caf*", kind="text"))


def test_what_is_no_regular_file_is_named_and_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "in/a.txt", "in/b.jsonl")
    for name in ("in/pipe.txt", "in/pipe.jsonl"):
        os.mkfifo(tmp_path / name)
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(tmp_path / "in")  # the path of a socket has a hundred characters at most
        listener.bind("socket.txt")
        assert relatives(plan(source(tmp_path / "in", kind="text"))) == ["a.txt"]
    folder = tmp_path / "in"
    said = f"not read: {folder}/pipe.txt (a named pipe), {folder}/socket.txt (a socket)"
    assert [record.getMessage() for record in caplog.records] == [f"source crawl: {said}"]
    assert relatives(plan(source(folder / "*.jsonl", kind="jsonl"))) == ["b.jsonl"]
    assert "pipe.jsonl (a named pipe)" in caplog.text
    for path, kind in ((folder / "pipe.jsonl", "named pipe"), (Path("/dev/zero"), "character device")):
        with pytest.raises(InputError, match=f"source crawl: {path}: is a {kind}; expected a regular file"):
            plan(source(path, kind="jsonl"))


def test_a_tree_s_groups_stay_when_files_are_added(tmp_path: Path) -> None:
    write(tmp_path, *(f"d{i % 7}/f{i}.txt" for i in range(200)))
    config = source(tmp_path, kind="text", groups=8)
    before = {file.relative_path: p.name for p in plan(config) for file in p.files}
    write(tmp_path, *(f"d{i % 5}/g{i}.txt" for i in range(50)))
    after = {file.relative_path: p.name for p in plan(config) for file in p.files}
    assert len(before) == 200
    assert before.items() < after.items()
    assert len(set(before.values())) == 8


def test_doc_ids_do_not_depend_on_the_number_of_groups(tmp_path: Path) -> None:
    write(tmp_path, *(f"f{i}.txt" for i in range(20)))
    assert relatives(plan(source(tmp_path, kind="text", groups=1))) == relatives(
        plan(source(tmp_path, kind="text", groups=5))
    )
    assert make_doc_id("crawl", "f1.txt", 0) != make_doc_id("crawl", "f2.txt", 0)


@with_each(
    ({"name": "Crawl"}, "pattern"),
    ({"name": "crawl.val"}, "pattern"),
    ({"kind": "csv"}, "warc"),
    ({"paths": []}, "expected at least one path"),
    ({"paths": ["a", " "]}, "no empty one"),
    ({"max_bytes": 0}, "greater than or equal to 1"),
    ({"priority": 1 << 63}, "less than 2147483648"),  # survivor order compares 64 bits
    ({"suffixes": [".x"]}, "suffixes: expected only with kind text or code, got kind warc"),
    ({"text_field": "body"}, "text_field: expected only with kind jsonl or parquet"),
    ({"kind": "text", "suffixes": ["md"]}, "expected suffixes with their dot"),
    ({"kind": "text", "groups": 0}, "greater than or equal to 1"),
    ({"glob": "x"}, "Extra inputs"),
)
def test_impossible_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SourceConfig.model_validate({"name": "crawl", "kind": "warc", "paths": "x"} | change)


def test_a_resolved_config_reads_back_to_itself() -> None:
    config = source("x/*", kind="jsonl", text_field="body")
    assert SourceConfig.model_validate(config.model_dump(mode="json")) == config


def test_a_file_larger_than_split_bytes_is_cut_into_ranges_that_are_the_file(tmp_path: Path) -> None:
    (tmp_path / "large.warc").write_bytes(bytes(5000))
    (tmp_path / "small.warc").write_bytes(bytes(2048))
    found = plan(source(tmp_path / "*.warc", split_bytes=2048))
    large = [partition for partition in found if partition.files[0].relative_path == "large.warc"]
    assert [(p.range.start, p.range.end, p.size) for p in large if p.range] == [
        (0, 2048, 2048),
        (2048, 4096, 2048),
        (4096, 5000, 904),
    ]
    (small,) = [partition for partition in found if partition.files[0].relative_path == "small.warc"]
    assert (small.range, small.size, small.name) == (None, 2048, partition_name("small.warc"))
    assert {p.undivided for p in large} == {partition_name("large.warc")}
    # Cut otherwise, a range has another name: what is committed of one is never taken for the other.
    other = plan(source(tmp_path / "large.warc", split_bytes=2049))
    assert {p.name for p in other}.isdisjoint(p.name for p in large)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,150}", p.name) for p in found)
    with pytest.raises(ValidationError, match="split_bytes: expected only with kind warc or wet"):
        source(tmp_path / "x.jsonl", kind="jsonl", split_bytes=4096)
