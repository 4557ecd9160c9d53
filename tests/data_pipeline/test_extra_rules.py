"""Rules of one's own: the example of docs/data-run.md, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from quern.cli.main import app
from quern.config import load_config
from quern.data_pipeline.stages.extra.modules import find_sources
from quern.data_run.config import DataRun
from quern.errors import InputError, QuernError
from support.data_pipeline.digests import pages_hash
from support.data_pipeline.in_process import run_config
from support.documents import ROOT, blocks

(EXAMPLE,) = (block.text for block in blocks(ROOT / "docs" / "data-run.md") if "class NoPoems" in block.text)
PROSE = "The small river carries the water from the mountains to the sea, and the people watch the ships go by. "
POEM = "Roses are red,\nviolets are blue,\nsugar is sweet,\nand so are you.\n"
SHARES = {POEM: 1.0, PROSE: 0.0, f"{PROSE}\n{POEM}": 0.8}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the example's module."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rules.py").write_text(EXAMPLE)
    return tmp_path


def config(texts: list[str], extra: list[Any], **more: Any) -> dict[str, Any]:
    Path("in.jsonl").write_text("".join(json.dumps({"id": str(n), "text": t}) + "\n" for n, t in enumerate(texts)))
    return {
        "run_dir": "run", "sources": [{"name": "s", "kind": "jsonl", "paths": "in.jsonl"}], "extra": extra,
        "language": {"keep": []}, "quality": {"order": []}, "duplicates": {"near": False},
        "tokenize": {"encoding": "trained", "vocab_size": 300}, **more,
    }  # fmt: skip


def verdicts(column: str, run: str = "run") -> list[tuple[Any, ...]]:
    (table,) = [pq.read_table(path) for path in Path(run).glob("verdicts/s/*.parquet")]
    rows = sorted(table.to_pylist(), key=lambda row: int(row["record_id"]))
    return [(row["stage"], row["reason"], row["failed_rules"], row[column]) for row in rows]


def test_the_example_drops_poems_and_is_in_columns_and_funnel(home: Path) -> None:
    both = ["my_rules:NoPoems", {"rule": "my_rules:NoPoems", "name": "few", "action": "measure",
                                 "options": {"max_short_lines": 0.5}}]  # fmt: skip
    stats = run_config(config(list(SHARES), both))
    why = "no_poems.short_lines"
    assert verdicts("no_poems.short_lines") == [
        ("no_poems", why, ["few.short_lines", why], 1.0), (None, None, [], 0.0), (None, None, ["few.short_lines"], 0.8),
    ]  # fmt: skip
    assert [row[3] for row in verdicts("few.short_lines")] == list(SHARES.values())
    assert (stats["by_stage"], stats["rules"]) == ({"no_poems": 1}, ["few", "no_poems"])
    shown = CliRunner().invoke(app, ["data", "report", "run"], env={"COLUMNS": "200"}).stdout
    life = CliRunner().invoke(app, ["lineage", "show", "run", "--shard", "s/shard_00000", "--token", "0"]).stdout
    assert "few: my_rules:NoPoems with max_short_lines 0.5\n" in life
    lines = [line.split() for line in shown.splitlines()]
    assert ["no_poems", "3", "1", "33.3%", "2", "66.7%", why, "1"] in lines
    assert ["few", "3", "–", "3", "100.0%"] in lines


def test_a_changed_source_is_refused_and_the_same_one_goes_on(home: Path) -> None:
    given = config(list(SHARES), ["my_rules:NoPoems"])
    stats = run_config(given)
    assert run_config(given)["by_reason"] == stats["by_reason"]
    (home / "my_rules.py").write_text(EXAMPLE.replace("< 40", "< 41"))
    with pytest.raises(InputError, match=r"another config: extra\.0\.source_digest is .* here \(my_rules:NoPoems\)"):
        run_config(given)
    pinned = json.loads((home / "run" / "run.json").read_text())["config"]["extra"]
    (home / "c.yaml").write_text(yaml.safe_dump(config(list(SHARES), pinned)))
    with pytest.raises(InputError, match=r"c\.yaml: extra: my_rules:NoPoems: the source of my_rules has changed"):
        load_config("c.yaml", DataRun)


def test_one_name_of_two_rules_in_two_recipes_is_refused(home: Path) -> None:
    (home / "others.py").write_text(EXAMPLE)
    given = config(list(SHARES), ["my_rules:NoPoems"])
    given["sources"][0]["recipe"] = {"extra": ["others:NoPoems"]}
    given["sources"].append({"name": "t", "kind": "jsonl", "paths": "in.jsonl"})
    with pytest.raises(
        ValueError, match="extra: the name 'no_poems' is of others:NoPoems and of my_rules:NoPoems, and"
    ):
        run_config(given)


@pytest.mark.slow
@pytest.mark.ray
def test_workers_of_ray_have_the_module_that_the_driver_read(home: Path) -> None:
    """Two workers, in whose working folders and paths the module is not; the second command finds the run complete."""
    package = home / "elsewhere" / "my_rules"
    package.mkdir(parents=True)
    (home / "my_rules.py").unlink()
    (package / "__init__.py").write_text("from .poems import NoPoems\n")
    (package / "poems.py").write_text(EXAMPLE.replace("40", "my_rules.limits.SHORT").replace(
        "from quern", "import my_rules.limits\nfrom quern"))  # fmt: skip
    (package / "limits.py").write_text("SHORT = 40\n")
    shutil.copytree(package.parent, home / "driver", dirs_exist_ok=True)
    sources = [{"name": name, "kind": "jsonl", "paths": f"{name}.jsonl"} for name in "st"]
    given = config([], ["my_rules:NoPoems"], sources=sources, workers=2)
    for number, name in enumerate("st"):
        texts = [f"{text}\nnumber {name}" for text in SHARES]
        lines = [json.dumps({"id": str(number * 10 + n), "text": text}) for n, text in enumerate(texts)]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    Path("c.yaml").write_text(yaml.safe_dump(given))
    program = (
        "import sys, shutil; sys.path.insert(0, 'driver'); from quern.config import load_config; "
        "from quern.data_run.config import DataRun; from quern.data_run.run import run_data; "
        "config = load_config('c.yaml', DataRun); shutil.rmtree('driver'); shutil.rmtree('elsewhere'); "
        "stats = run_data(config); print(stats['by_stage'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'no_poems': 4}"
    assert [row[3] for row in verdicts("no_poems.short_lines")] == [1.0, 0.5, pytest.approx(6 / 7)]


BROKEN = {
    "Raises": "    def measure(self, page):\n        raise KeyError('gone')\n",
    "Elsewhere": "    columns = ('a',)\n    def measure(self, page):\n        return {'b': 1}\n",
    "NotANumber": "    columns = ('a',)\n    def measure(self, page):\n        return {'a': float('nan')}\n",
    "Nothing": "    def measure(self, page):\n        return None\n",
    "Writes": "    def measure(self, page):\n        page.text = 'mine'\n        return {}\n",
    "Told": "    def measure(self, page):\n        return {}\n    def decide(self, _):\n        return 'Why not?'\n",
}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Elsewhere", "extra: broken:Elsewhere: measured 'b', which is none of its columns"),
        ("NotANumber", "extra: broken:NotANumber: column a: expected a finite number or None, got nan"),
        ("Nothing", "extra: broken:Nothing: measure: expected a mapping of columns to numbers, got None"),
        ("Writes", "extra: broken:Writes: measure: has changed page.text; a rule measures, and changes nothing"),
        ("Told", "extra: broken:Told: decide: expected names of small letters, digits and _, got 'Why not?'"),
    ],
)
def test_a_rule_that_answers_wrongly_ends_the_run(home: Path, name: str, told: str) -> None:
    (home / "broken.py").write_text(f"from quern import Rule\nclass {name}(Rule):\n{BROKEN[name]}")
    with pytest.raises(QuernError) as caught:
        run_config(config([PROSE], [f"broken:{name}"]))
    assert told in str(caught.value)


def test_an_error_of_a_rule_quarantines_the_page(home: Path) -> None:
    (home / "broken.py").write_text(f"from quern import Rule\nclass Raises(Rule):\n{BROKEN['Raises']}")
    stats = run_config(config([PROSE], ["broken:Raises"]))
    assert stats["by_reason"] == {"quarantine:quarantine.raises.keyerror": 1}


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("quern.config:Section", "quern: is the name of a module that quern needs itself"),
        ("re:X", "re: is the name of a module that quern needs itself"),
        ("numpy:X", "numpy.py: has the name of an installed package; give it another"),
        ("idle:X", "idle:X: expected a method measure"),
        ("none_such:Rule", "none_such: no such module in "),
        ("my_rules:Poems", "my_rules:Poems: expected a class Poems in my_rules that is a quern.Rule"),
        ("my_rules:os", "expected a class os in my_rules that is a quern.Rule"),
        ("my_rules", "expected MODULE:CLASS, such as my_rules:NoPoems, got 'my_rules'"),
        ("bad:X", "bad: cannot be imported (ZeroDivisionError: division by zero)"),
        ("shouting:X", "columns: expected a tuple of different names of small letters, digits and _"),
        ({"rule": "my_rules:NoPoems", "name": "quality"}, "its name 'quality' is taken or too long"),
        ({"rule": "my_rules:NoPoems", "options": {"max_short": 1}}, "max_short: unknown key; did you mean 'max_short_"),
        ({"rule": "my_rules:NoPoems", "options": {"max_short_lines": "0.8"}}, "max_short_lines: expected a number"),
        ({"name": "x"}, "extra.0.rule: missing; this key is required"),
        ({"rule": "my_rules:NoPoems", "source_digest": "0"}, "has changed: expected digest 0, got "),
    ],
)
def test_what_is_no_rule_is_refused_before_the_run(home: Path, extra: Any, told: str) -> None:
    head = "from quern import Rule\nclass X(Rule):\n"
    modules = {
        "bad": "1 / 0\n", "numpy": "", "idle": f"{head}    pass\n",
        "shouting": f"{head}    columns = ('LOUD',)\n    def measure(self, page): ...\n",
    }  # fmt: skip
    for name, text in modules.items():
        (home / f"{name}.py").write_text(text)
    (home / "c.yaml").write_text(yaml.safe_dump(config([PROSE], [extra])))
    with pytest.raises(InputError) as caught:
        load_config("c.yaml", DataRun)
    assert told in str(caught.value)
    assert str(caught.value).startswith("c.yaml: extra")
    (home / "c.yaml").write_text(yaml.safe_dump(config([PROSE], ["my_rules:NoPoems"] * 2)))
    with pytest.raises(InputError, match="two rules have the name 'no_poems'"):
        load_config("c.yaml", DataRun)


def test_modules_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(InputError, match="no such module in"):
        find_sources("no_such_module")
    sources = find_sources("yaml")
    assert sources.is_installed, "an installed package is imported, not sent"
    assert sources.files["yaml"][0]
    assert sources.digest == find_sources("yaml").digest


def test_files_that_options_name_are_in_the_hash_and_other_texts_are_none(home: Path) -> None:
    rule = "from quern import Rule\nclass X(Rule):\n    words: str\n    def measure(self, page):\n        return {}\n"
    (home / "listed.py").write_text(rule)

    def hashed(words: str) -> dict[str, str]:
        return pages_hash(DataRun.model_validate(config([], [{"rule": "listed:X", "options": {"words": words}}])))

    (home / "badwords").write_text("one")
    before = [hashed(text) for text in ("badwords", ".", "*", "^https?://x/")]
    (home / "badwords").write_text("two")
    (home / "another").write_text("file")
    after = [hashed(text) for text in ("badwords", ".", "*", "^https?://x/")]
    assert before[0] != after[0]
    assert before[1:] == after[1:]
