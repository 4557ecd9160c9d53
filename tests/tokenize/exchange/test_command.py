"""The commands: out, in again, and the other commands on what was imported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quern.cli.main import app
from support.exchange import plain_formats as plain
from support.exchange.import_case import EOT, write

DOCUMENTS = [[*b"mill and stone", EOT], [*b"the river", EOT], [*b"flour", EOT]]


def quern(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def asked(capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command prints with --json, which goes to the file descriptor."""

    def ask(*arguments: object) -> Any:
        capfd.readouterr()
        done = quern(*arguments, "--json")
        assert done.exit_code == 0, done.output
        return json.loads(capfd.readouterr().out)

    return ask


@pytest.fixture
def imported(asked: Callable[..., Any], ranks: str, tmp_path: Path) -> Path:
    path = write("megatron", tmp_path, "a", DOCUMENTS)
    told = asked("tokens", "import", path, "--format", "megatron", "--out", tmp_path / "run", "--encoding", "own",
                 "--ranks", ranks)  # fmt: skip
    assert (told["documents"], told["tokens"], told["files"][0]["sidecar"]) == (3, 31, False)
    return tmp_path / "run"


@pytest.mark.slow
def test_what_is_shown_of_an_imported_document(imported: Path, asked: Callable[..., Any], tmp_path: Path) -> None:
    """The second document, by one of its tokens: 15 tokens of 2 bytes stand before it."""
    shard = "imported/shard_00000"
    life = asked("lineage", "show", imported, "--shard", shard, "--token", 17)
    document = life["document"]
    assert document["doc_id"] == plain.place_id("imported", "a.bin", 30).hex()
    assert (document["url"], document["outcome"], document["source"]) == (None, "kept", "imported")
    assert document["record"] | {"file": str(tmp_path / "a.bin"), "offset": 30, "length": 20} == document["record"]
    assert (document["text"]["text"], document["text"]["same"]) == ("the river", True)
    shown = quern("lineage", "show", imported, "--shard", shard, "--token", 17).stdout
    assert "at byte 30, 20 bytes" in shown
    found = asked("tokens", "inspect", imported / "tokens/imported/shard_00000.bin", "--at", 17)
    assert found["page"]["record_offset"] == 30
    rows = asked("lineage", "sql", imported, "select record_offset from verdicts order by 1")
    assert [next(iter(row.values())) if isinstance(row, dict) else row[0] for row in rows["rows"]] == [0, 30, 50]
    assert asked("data", "status", imported)["status"] == "complete"


@pytest.mark.slow
def test_out_and_in_on_the_terminal(imported: Path, tmp_path: Path) -> None:
    done = quern(
        "tokens", "export", imported, "--format", "datatrove", "--out", tmp_path / "out", "--no-eot", "--merge"
    )
    assert done.exit_code == 0, done.output
    assert "1 of 3 documents, 28 tokens" in done.stdout
    assert plain.read_datatrove(tmp_path / "out" / "imported.ds")[1] == [document[:-1] for document in DOCUMENTS]
    ranks = imported / "tokens" / "encoding.tiktoken"
    back = quern("tokens", "import", tmp_path / "out" / "imported.ds", "--format", "datatrove", "--out",
                 tmp_path / "back", "--encoding", "own", "--ranks", ranks)  # fmt: skip
    assert back.exit_code == 0, back.output
    assert "3, 3 of them known by their crawl record" in back.stdout
    assert "3 documents got an EOT" in back.stdout
    offsets = [plain.place_id("imported", "a.bin", offset) for offset in (0, 30, 50)]
    assert [doc_id for doc_id, _ in plain.read_run(tmp_path / "back", "imported")] == offsets


@pytest.mark.slow
def test_a_wrong_input_is_one_line_and_exit_code_2(imported: Path, tmp_path: Path) -> None:
    for arguments in (
        ("tokens", "export", imported, "--format", "tar", "--out", tmp_path / "x"),
        ("tokens", "export", tmp_path, "--format", "bin", "--out", tmp_path / "x"),
        ("tokens", "import", tmp_path / "a.bin", "--format", "datatrove", "--out", tmp_path / "x",
         "--encoding", "nope"),
        ("tokens", "import", tmp_path / "b.bin", "--format", "bin", "--out", tmp_path / "x", "--encoding", "own",
         "--ranks", imported / "tokens" / "encoding.tiktoken"),
    ):  # fmt: skip
        done = quern(*arguments)
        assert done.exit_code == 2, done.output
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stderr.startswith("error: ")
        assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_nothing_is_left(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(plain.pack("uint16", [*[65] * 999, EOT] * 1000))
    code = (  # a limit of a file's size stands for the disk's
        "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from quern.cli.main import app\napp(sys.argv[1:])\n"
    )
    words = ["tokens", "import", "a.bin", "--format", "bin", "--out", "run", "--encoding", "own", "--ranks", ranks]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path / 'run'}: cannot be written (File too large)\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.slow
def test_an_import_without_its_verdicts(ranks: str, tmp_path: Path, asked: Callable[..., Any]) -> None:
    """It has no commits: ``run.json`` tells which files had documents."""
    paths = [write("megatron", tmp_path, name, DOCUMENTS) for name in "ab"]
    run = tmp_path / "run"
    done = quern(
        "tokens", "import", *paths, "--format", "megatron", "--out", run, "--encoding", "own", "--ranks", ranks
    )
    assert done.exit_code == 0, done.output
    assert quern("lineage", "verify", run).exit_code == 0
    shard = run / "tokens/imported/shard_00001.bin"
    assert asked("tokens", "inspect", shard, "--at", 0)["no_page"] is None

    _, second = sorted((run / "verdicts/imported").iterdir())
    second.unlink()
    there = sorted(tmp_path.iterdir())
    refused = quern("tokens", "export", run, "--format", "bin", "--out", tmp_path / "out")
    first_of_it = plain.place_id("imported", "b.bin", 0).hex()
    assert refused.exit_code == 2
    assert f"has no verdict of document {first_of_it}: {second} is committed and missing" in refused.stderr
    assert sorted(tmp_path.iterdir()) == there
    found = asked("tokens", "inspect", shard, "--at", 0)
    assert (found["page"], f"verdicts/imported/{second.name} is" in found["no_page"]) == (None, True)
    told = quern("tokens", "inspect", shard, "--at", 0)
    assert (told.exit_code, told.stderr.count("\n")) == (0, 1)
    assert f"{first_of_it}: its verdict" in told.stderr
    assert quern("lineage", "verify", run).exit_code == 1
