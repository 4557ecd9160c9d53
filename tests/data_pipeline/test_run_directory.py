"""One driver, one config, one set of inputs a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quern import storage
from quern.data_pipeline.execution.run_directory import is_complete, open_run
from quern.errors import InputError, QuernError

CONFIG: dict[str, Any] = {
    "run_dir": "x",
    "workers": 2,
    "seed": 0,
    "ray": {"address": None},
    "isolation": {"page_timeout_s": 60},
    "sources": [{"name": "s", "paths": "a", "kind": "warc"}],
    "language": {"keep": ["en"], "threshold": 0.65},
}


def installed(folder: Path, name: str, number: str) -> None:
    """A distribution in ``folder`` that gives the module ``fasttext``."""
    (folder / "fasttext").mkdir(parents=True, exist_ok=True)
    (folder / "fasttext" / "__init__.py").touch()
    facts = folder / f"{name.replace('-', '_')}-{number}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")


def changed(**keys: Any) -> dict[str, Any]:
    return {**CONFIG, **keys}


def test_a_new_run_is_running_and_says_what_it_is(tmp_path: Path) -> None:
    with open_run(str(tmp_path / "run"), CONFIG) as run:
        assert not run.complete
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert record["status"] == "running"
        assert record["config"] == CONFIG
        assert {"quern", "python", "trafilatura", "datasketch"} <= record["versions"].keys()
        run.finish({"pages": 3}, "inputs")
    with open_run(str(tmp_path / "run"), CONFIG) as run:
        assert run.complete
        assert run.record["counts"] == {"pages": 3}


@pytest.mark.parametrize(
    "same",
    [
        {"workers": 9},
        {"run_dir": "moved"},
        {"ray": {"address": "auto"}},
        {"isolation": {"page_timeout_s": 1}},
        {"sources": [{"name": "s", "paths": "b", "kind": "warc"}]},
        {"sources": [{"name": "s", "paths": "a", "kind": "warc", "split_bytes": 4096}]},
    ],
)
def test_what_decides_no_byte_may_change(tmp_path: Path, same: dict[str, Any]) -> None:
    with open_run(str(tmp_path), CONFIG):
        pass
    with open_run(str(tmp_path), changed(**same)) as run:
        assert not run.complete


@pytest.mark.parametrize(
    ("other", "key"),
    [
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"language": {"keep": ["en"], "threshold": 0.5}}, "language.threshold is 0.65 there and 0.5 here"),
        (
            {"language": {"keep": ["en", "de"], "threshold": 0.65}},
            'language.keep is ["en"] there and ["en", "de"] here',
        ),
        (
            {"sources": [{"name": "t", "paths": "a", "kind": "warc"}]},
            "source s is missing here, source t is missing there; give",
        ),
        ({"language": None}, 'language is {"keep": ["en"], "threshold": 0.65} there and null here'),
        (
            {"sources": [{"name": "s", "paths": "b", "kind": "wet"}, {"name": "t"}], "seed": 2},
            'seed is 0 there and 2 here, source t is missing there, source s: kind is "warc" there and "wet" here',
        ),
        (
            {f"k{n}": n for n in range(10)},
            ", ".join(f"k{n} is not given there and {n} here" for n in range(8))
            + ", and 2 more keys; give another run_dir",
        ),
    ],
)
def test_another_config_is_refused_by_its_key(tmp_path: Path, other: dict[str, Any], key: str) -> None:
    with open_run(str(tmp_path), CONFIG):
        pass
    with pytest.raises(InputError) as caught, open_run(str(tmp_path), changed(**other)):
        pass
    assert str(caught.value).startswith(f"{tmp_path}: holds a run with another config: {key}")


def test_sources_are_compared_by_their_names(tmp_path: Path) -> None:
    sources = [{"name": name, "paths": name, "kind": "warc"} for name in ("a", "b", "c")]
    with open_run(str(tmp_path), changed(sources=sources)):
        pass
    for here, told in (
        (sources[1:], "source a is missing here"),
        ([sources[0], {**sources[2], "kind": "wet"}], 'source b is missing here, source c: kind is "warc" there and'),
        (sources[::-1], 'the order of sources is ["a", "b", "c"] there and ["c", "b", "a"] here'),
        ([{**sources[0], "paths": "elsewhere", "kind": "wet"}, *sources[1:]], 'source a: kind is "warc" there and "we'),
    ):
        with pytest.raises(InputError) as caught, open_run(str(tmp_path), changed(sources=here)):
            pass
        assert str(caught.value).startswith(f"{tmp_path}: holds a run with another config: {told}")


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match=r"holds no run \(thesis\.txt"), open_run(str(tmp_path), CONFIG):
        pass
    assert os.listdir(tmp_path) in (["thesis.txt"], [".lock", "thesis.txt"], ["thesis.txt", ".lock"])


def test_the_same_config_gives_the_same_id_and_another_another(tmp_path: Path) -> None:
    ids = []
    for name, config in (("a", CONFIG), ("b", changed(workers=5)), ("c", changed(seed=1))):
        with open_run(str(tmp_path / name), config) as run:
            ids.append(run.record["id"])
    assert ids[0] == ids[1] != ids[2]


def test_the_same_recipe_over_another_crawl_is_another_run(tmp_path: Path) -> None:
    ids = []
    for name, identity in (("a", "crawl 1"), ("b", "crawl 2"), ("c", "crawl 1")):
        with open_run(str(tmp_path / name), CONFIG, identity) as run:
            ids.append(run.record["id"])
    assert ids[0] == ids[2] != ids[1]


def test_an_unfinished_run_goes_on_only_with_the_libraries_it_began_with(tmp_path: Path) -> None:
    with open_run(str(tmp_path), CONFIG):
        pass
    record = json.loads((tmp_path / "run.json").read_text())
    record["versions"]["trafilatura"] = "1.0"
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"begun with trafilatura 1\.0"), open_run(str(tmp_path), CONFIG):
        pass
    (tmp_path / "run.json").write_text(json.dumps({**record, "status": "complete"}))
    with open_run(str(tmp_path), CONFIG) as run:
        assert run.complete


@pytest.mark.parametrize(("begun", "now"), [("predict", "turbo"), ("turbo", "predict")])
def test_an_unfinished_run_begun_with_another_fasttext_says_which_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str, now: str
) -> None:
    for name in (begun, now):
        folder = tmp_path / "of" / name
        installed(folder, f"fasttext-{name}", "1.5")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            patch.delitem(sys.modules, "fasttext", raising=False)
            if name == begun:
                for _ in range(2):  # goes on with what it was begun with
                    with open_run(str(tmp_path / "run"), CONFIG) as run:
                        assert run.record["versions"][f"fasttext-{name}"] == "1.5"
                continue
            with pytest.raises(InputError) as caught, open_run(str(tmp_path / "run"), CONFIG):
                pass
    assert f"pip uninstall fasttext-{now}, then pip install fasttext-{begun}==1.5" in str(caught.value)


def test_two_distributions_of_fasttext_in_one_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fasttext-turbo", "fasttext-predict"):
        installed(tmp_path / "lib", name, "1.5")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.delitem(sys.modules, "fasttext", raising=False)
    expected = pytest.raises(QuernError, match=r"uninstall both, then install fasttext-predict")
    with expected, open_run(str(tmp_path / "run"), CONFIG):
        pass
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_module_fasttext_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path / "lib", "fasttext", "1.5")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.delitem(sys.modules, "fasttext", raising=False)
    expected = pytest.raises(QuernError, match=r"of no distribution that quern knows; .*install fasttext-predict")
    with expected, open_run(str(tmp_path / "run"), CONFIG):
        pass


@pytest.mark.slow
def test_a_second_driver_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    code = (
        "import json, sys, time\n"
        "from quern.data_pipeline.execution.run_directory import open_run\n"
        f"with open_run({str(tmp_path)!r}, json.loads({json.dumps(json.dumps(CONFIG))})):\n"
        "    print('open', flush=True)\n"
        "    time.sleep(600)\n"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "open\n"
    with pytest.raises(QuernError, match="another driver is at work"), open_run(str(tmp_path), CONFIG):
        pass
    first.kill()
    first.wait()
    with open_run(str(tmp_path), CONFIG):
        pass


def test_what_a_killed_driver_left_half_written_goes(tmp_path: Path) -> None:
    with open_run(str(tmp_path), CONFIG):
        pass
    torn = tmp_path / "verdicts" / "s" / f".p.parquet.{'0' * 32}.tmp"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"half")
    storage.publish_bytes(str(tmp_path / "verdicts" / "s" / "p.parquet"), b"whole")
    with open_run(str(tmp_path), CONFIG):
        pass
    assert [path.name for path in torn.parent.iterdir()] == ["p.parquet"]


def test_a_run_json_of_something_else_is_refused(tmp_path: Path) -> None:
    for text in ('{"model": "8b"}', "[]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(InputError, match=r"run\.json: is not of a data run"), open_run(str(tmp_path), CONFIG):
            pass
        assert not is_complete(str(tmp_path))


def test_unfinished_work_of_a_complete_run_goes_when_it_is_opened(tmp_path: Path) -> None:
    with open_run(str(tmp_path), CONFIG) as run:
        assert not is_complete(str(tmp_path))
        run.finish({}, "inputs")
    assert is_complete(str(tmp_path))
    storage.publish_bytes(str(tmp_path / ".work" / "left"), b"")  # killed between the last two acts
    with open_run(str(tmp_path), CONFIG):
        assert not (tmp_path / ".work").exists()


def test_what_a_killed_worker_left_half_written_is_gone_with_the_end_of_the_run(tmp_path: Path) -> None:
    with open_run(str(tmp_path / "run"), CONFIG) as run:
        torn = tmp_path / "run" / "tokens" / "s" / f".shard_00002.bin.{'0a' * 16}.tmp"
        torn.parent.mkdir(parents=True)
        torn.write_bytes(b"half")
        run.finish({}, "inputs")
        assert not torn.exists()
