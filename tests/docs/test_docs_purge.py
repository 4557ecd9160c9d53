"""docs/purge.md does what it says: its commands, in its order, on real pages among which a benchmark was planted."""

from __future__ import annotations

import gzip
import html
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from quern.cli import main
from quern.demo.kinds import Draft
from quern.demo.warc import warc_file
from quern.train.batches.corpus import Corpus
from quern.train.batches.mixture import plan_mixture
from quern.train.config import TrainConfig
from support.data_pipeline import in_process
from support.documents import ROOT, blocks, commands
from support.programs import python

pytestmark = [pytest.mark.shared, pytest.mark.long]

SITE = "https://quiz.example.net/sums"
ITEMS, PAGES = 9, 6
"""Items of the benchmark on each of so many pages."""


def planted(benchmark: Path) -> bytes:
    """A WARC of pages that show items of the benchmark; the first of them stands at a second address, too."""
    items = [json.loads(line) for line in benchmark.read_text().splitlines()]
    pages = []
    for number in range(PAGES):
        own = items[number * ITEMS : (number + 1) * ITEMS]
        parts = [f"<h2>Sum {n}</h2>\n<p>{html.escape(item['question'])}</p>" for n, item in enumerate(own, 1)]
        body = (
            f"<h1>Sums of week {number + 1}</h1>\n<p>Here are the sums that we solved with the class this week.</p>\n"
        )
        text = f"<html lang='en'><head><title>Sums</title></head><body><article>{body}{''.join(parts)}</article></body>"
        pages.append(("2024-03-01T00:00:00Z", Draft("", "en", f"{SITE}/week-{number + 1}", text)))
    pages.append(("2024-03-02T00:00:00Z", Draft("", "en", "https://copies.example.org/a", pages[0][1].html)))
    return gzip.decompress(warc_file("planted.warc.gz", pages, seed=0)[0])  # no byte of it is a compressor's choice


class Shell:
    """Runs the page's commands in this process; ``said`` has what each printed."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.step: str | None = None

    def run(self, line: str) -> None:
        words = shlex.split(line.replace("STEP", self.step or "STEP"))
        assert words[0] == "quern"
        if words[1] == "train":  # logs to the terminal that it finds when it begins
            command = [python(), "-m", "quern.cli.main", *words[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            code, said = done.returncode, done.stdout + done.stderr
        else:
            result = CliRunner().invoke(main._build([words[1]]), words[1:])
            code, said = result.exit_code, result.output
        assert code == 0, (line, said)
        self.said[line] = said
        if "--dry-run" in words:
            (self.step,) = re.findall(r"resume\.step=(\d+)", said)

    def lines(self, *words: str) -> list[str]:
        """What the last command with these words printed."""
        return [said for line, said in self.said.items() if all(word in line for word in words)][-1].splitlines()


def read_late(config: Path) -> None:
    """Change the seed until the first two checkpoints have read no token of the benchmark's pages."""
    questions = [json.loads(line)["question"] for line in Path("gsm8k_test.jsonl").read_text().splitlines()]
    documents = [row for path in Path("crawl/documents").rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
    pages = {row["doc_id"] for row in documents if any(one in row["text"] for one in questions[: ITEMS * PAGES])}
    (spans,) = Path("crawl/tokens/cc").glob("*.spans.parquet")
    read = [(row["start"], row["start"] + row["length"]) for row in pq.read_table(spans).to_pylist()
            if row["doc_id"] in pages]  # fmt: skip
    assert read
    settings = yaml.safe_load(config.read_text())
    length, batch, steps = settings["seq_len"], settings["global_batch"], 2 * settings["checkpoint"]["interval"]
    for seed in range(settings["seed"], settings["seed"] + 200):
        plan = TrainConfig.model_validate(settings | {"seed": seed})
        order = plan_mixture(plan, Corpus([source.path for source in plan.data], length)).order
        starts = [int(window) * length for window in order.samples(range(batch * steps))[2]]
        if not any(start <= end and first <= start + length for start in starts for first, end in read):
            config.write_text(config.read_text().replace(f"seed: {settings['seed']}", f"seed: {seed}"))
            return
    raise AssertionError("no seed reads them late")


@pytest.fixture(scope="module")
def shell(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    folder = tmp_path_factory.mktemp("exercise")
    (folder / "warc").mkdir()
    shutil.copyfile(shared / "data" / "benchmarks" / "gsm8k_test.jsonl", folder / "gsm8k_test.jsonl")
    real = sorted((shared / "data" / "warc").glob("*.warc.gz"))[2]
    (folder / "warc" / real.name).symlink_to(real)
    (folder / "warc" / "planted.warc").write_bytes(planted(folder / "gsm8k_test.jsonl"))
    (folder / "configs").symlink_to(ROOT / "configs")
    shell = Shell()
    with pytest.MonkeyPatch.context() as patch, in_process.engine():
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        for block in blocks(ROOT / "docs" / "purge.md"):
            if block.language == "yaml":
                Path(block.name).write_text(block.text)
                read_late(Path(block.name))
            elif block.language == "sh":
                for command in commands(block):
                    shell.run(command.line)
        yield shell


def test_every_command_of_the_page_does_what_the_page_says(shell: Shell) -> None:
    for line, said in shell.said.items():
        print(f"$ {line}\n{said}")
    assert [" ".join(shlex.split(line)[1:3]) for line in shell.said] == [
        "data run", "train train.yaml", "lineage match", "lineage exposure", "lineage purge", "lineage purge",
        "lineage verify", "lineage match", "train model/config.yaml", "data run", "lineage match",
    ]  # fmt: skip
    found = next(said for line, said in shell.said.items() if "--out" in line)
    assert re.search(r"^\d documents hold text of \d+ of 1,319 items", found, re.MULTILINE)
    (exposed,) = (said for line, said in shell.said.items() if "exposure" in line)
    last_clean = re.search(r"^last clean +step (\d+) ", exposed, re.MULTILINE)
    assert last_clean is not None
    assert shell.step == last_clean[1]


def test_what_the_exercise_leaves(shell: Shell) -> None:
    """By the files: nothing of the benchmark among the texts that are kept, the rest is what a fresh run keeps, and the
    training went back."""
    benchmark = [json.loads(line)["question"] for line in Path("gsm8k_test.jsonl").read_text().splitlines()]
    questions = [" ".join(question.split()) for question in benchmark[: ITEMS * PAGES]]
    sizes = {}
    for run in ("crawl", "later"):
        rows = [
            row for path in sorted(Path(run, "documents").rglob("*.parquet")) for row in pq.read_table(path).to_pylist()
        ]
        texts = [" ".join(row["text"].split()) for row in rows if row["kept"]]
        assert len(texts) > 40
        assert not [question for question in questions for text in texts if question in text]
        record = json.loads(Path(run, "tokens", "VERSION.json").read_text())
        spans = [pq.read_table(Path(run, "tokens", s["spans"])) for s in record["sources"]["cc"]["shards"]]
        kept = [row["doc_id"] for table in spans for row in table.to_pylist() if not row["purged"]]
        sizes[run] = sorted(kept)
    assert sizes["crawl"] == sizes["later"] != []
    assert "0 documents hold text of 0 of 1,319 items" in "\n".join(shell.lines("match", "crawl"))
    assert "0 documents hold text of 0 of 1,319 items" in "\n".join(shell.lines("match", "later"))
    moves = [json.loads(line) for line in Path("model/ledger.jsonl").read_text().splitlines()]
    moves = [entry for entry in moves if entry["kind"] in ("start", "rollback")]
    assert [(entry["step"], [*entry["versions"].values()]) for entry in moves] == [
        (0, [1]),
        (int(shell.step or -1), [2]),
    ]
    (entry,) = (json.loads(path.read_text()) for path in Path("crawl/audit").glob("*.json"))
    assert entry["reason"] == "GSM8K test items"
