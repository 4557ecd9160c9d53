"""``quern lineage purge`` and ``quern data run`` on a run of the real road."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from typer.testing import CliRunner

from quern import storage
from quern.cli import data
from quern.cli.lineage import app
from quern.data_run.run import run_data
from quern.lineage.purge.proof.verify import verify
from support.purge import corpus_scan as C
from support.purge import small_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("made")
    small_run.write_input(base / "in")
    small_run.make(small_run.settings(str(base / "run"), base / "in"))
    return base


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path / "run"


def call(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0, both: bool = False) -> str:
    """What a command prints, on stderr where it fails; on ``both`` if asked."""
    capfd.readouterr()
    assert (app([*arguments], standalone_mode=False) or 0) == code
    out, err = capfd.readouterr()
    return out + err if both else err if code else out


@pytest.fixture
def purge(run: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    return lambda *options: json.loads(call(capfd, "purge", str(run), *options, "--json"))


def on_site(run: Path, site: str) -> set[bytes]:
    rows = C.verdicts(run, ["doc_id", "canonical_url"])
    return {row["doc_id"] for row in rows if row["canonical_url"].startswith(f"https://{site}/")}


def in_tokens(run: Path) -> set[bytes]:
    """Documents with tokens that are not purged."""
    shards = (shard for own in C.scan(run).values() for shard in own)
    return {piece.doc_id for shard in shards for piece in shard if not piece.purged}


def test_a_domain_is_purged_and_stays_away(
    run: Path, purge: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    files, gone, before = C.tree(run.parent), on_site(run, "leak.example"), in_tokens(run)
    told = purge("--domain", "leak.example", "--mode", "mask", "--dry-run")
    assert C.tree(run.parent) == files
    done = purge("--domain", "leak.example", "--mode", "mask", "--reason", "they asked")
    assert done["documents_purged"] == told["documents_purged"] == len(before - in_tokens(run))
    assert not gone & in_tokens(run)
    assert done["condemned_selected"] == len(gone)
    assert verify(str(run), deep=True).holds
    entry = json.loads((run / "audit/00001.json").read_text())
    assert (entry["reason"], entry["selection"]) == ("they asked", {"domain": ["leak.example"]})
    files = C.tree(run.parent)
    again = purge("--domain", "leak.example", "--mode", "rewrite")
    assert again["version"] == {"before": 2, "after": 2}
    assert (again["audit"], again["tombstones"]) == (None, None)
    assert C.tree(run.parent) == files
    text = call(capfd, "purge", str(run), "--domain", "leak.example", "--mode", "mask")
    assert "none to purge (purged before); the corpus stays at version 2" in text
    shutil.rmtree(f"{run}.purge-list")  # what was purged is remembered again where nobody does any more
    again = purge("--domain", "leak.example", "--mode", "mask")
    assert Path(again["tombstones"]).exists()
    assert again["version"] == {"before": 2, "after": 2}


@pytest.mark.long
def test_purges_after_each_other_restore_what_they_may(run: Path, purge: Callable[..., Any]) -> None:
    purge("--domain", "a.example", "--mode", "mask")
    purged = {row["doc_id"] for row in C.rows(run / "audit/00001.parquet")}
    done = purge("--domain", "leak.example", "--mode", "rewrite", "--duplicates", "restore")
    there = in_tokens(run)
    assert not there & (purged | on_site(run, "leak.example"))
    assert done["documents_restored"] > 0
    changes = {row["doc_id"]: row["action"] for row in C.rows(run / "tokens/changes.v3.parquet")}
    restored = {doc_id for doc_id, action in changes.items() if action == "restored"}
    assert len(restored) == done["documents_restored"]
    assert restored <= there
    assert verify(str(run), deep=True).holds
    assert not purge("--domain", "leak.example", "--mode", "rewrite", "--duplicates", "restore")["touched"]


def test_data_run_leaves_a_purged_run_as_it_is(run: Path, made: Path, purge: Callable[..., Any]) -> None:
    config = small_run.settings(str(run), made / "in")
    stats = run_data(config)
    purge("--domain", "leak.example", "--mode", "rewrite")
    files = C.tree(run)
    again = run_data(config)
    told = CliRunner().invoke(data.app, ["report", str(run)]).output
    assert "purged     in 1 purge: the figures above are of the run as it was, the tokens are those of corpus" in told
    assert C.tree(run) == files
    assert again == json.loads((run / "stats.json").read_text())
    assert again["pages"] == stats["pages"]
    (run / "audit/00001.json").write_text("damaged")
    assert CliRunner().invoke(data.app, ["report", str(run)]).output == told


def test_a_near_copy_that_stays_is_named_with_the_command_that_purges_it(
    run: Path, purge: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    urls = {row["doc_id"]: row["canonical_url"] for row in C.verdicts(run, ["doc_id", "canonical_url"])}
    decided = [row for row in C.rows(run / "duplicates/decisions.parquet") if row["kind"] == "near"]
    survivors = {row["duplicate_of"] for row in C.rows(run / "duplicates/decisions.parquet")}
    pair = next(row for row in decided if row["doc_id"] not in survivors)
    gone, stays = urls[pair["doc_id"]], urls[pair["duplicate_of"]]
    text = " ".join(call(capfd, "purge", str(run), "--url", gone, "--mode", "mask", "--dry-run", both=True).split())
    doc_id = pair["duplicate_of"].hex()
    assert f"{gone} was removed as a near duplicate of {stays} ({doc_id}), which stays: " in text
    assert f"to purge it too: quern lineage purge {run} --mode mask --doc {doc_id}" in text
    told = purge("--url", gone, "--mode", "mask")["near_copies_kept"]
    assert [(row["doc_id"], row["url"], row["removed_url"]) for row in told] == [(doc_id, stays, gone)]
    assert pair["duplicate_of"] in in_tokens(run)
    assert purge("--doc", doc_id, "--mode", "mask")["near_copies_kept"] == []  # the copy goes, nothing of it stays
    assert pair["duplicate_of"] not in in_tokens(run)
    assert purge("--url", gone, "--mode", "mask")["near_copies_kept"] == []  # purged before


class Dead(BaseException):
    """A process that ends here."""


@pytest.mark.parametrize("done", [False, True])
def test_data_run_takes_up_a_purge_that_was_cut_off(
    run: Path, made: Path, monkeypatch: pytest.MonkeyPatch, done: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    files, gone = C.tree(run, "tokens"), on_site(run, "leak.example")
    publish = storage.publish

    @contextmanager
    def cut(path: str) -> Iterator[IO[bytes]]:
        if path.endswith("VERSION.json") and not done:
            raise Dead
        with publish(path) as file:
            yield file
        if path.endswith("VERSION.json"):
            raise Dead

    with monkeypatch.context() as patch:
        patch.setattr(storage, "publish", cut)
        with pytest.raises(Dead):
            app(["purge", str(run), "--domain", "leak.example", "--mode", "mask"], standalone_mode=False)
    run_data(small_run.settings(str(run), made / "in"))
    told = " ".join(capsys.readouterr().err.split())
    if done:
        assert "it is finished: corpus version 2" in told
        assert not gone & in_tokens(run)
        assert verify(str(run), deep=True).holds
    else:
        assert "it is undone: corpus version 1" in told
        assert C.tree(run, "tokens") == files


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mode", "mask"], "expected one of --url"),
        (["--mode", "mask", "--domain", "nowhere.example"], "has no document of host: nowhere.example"),
        (["--mode", "mask", "--domain", "a.example", "--duplicates", "restore"], "use --mode rewrite"),
        (["--mode", "mask", "--domain", "a.example", "--purge-list", "{run}/here"], "would go with the run"),
    ],
)
def test_what_cannot_be_asked_changes_nothing(
    run: Path, options: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    files = C.tree(run)
    error = call(capfd, "purge", str(run), *(option.format(run=run) for option in options), code=2)
    assert message in error
    assert error.count("\n") == 1
    assert C.tree(run) == files
