"""Commands of the documentation run, each on what those before it have left; on a small sample where they are large."""

from __future__ import annotations

import glob
import json
import re
import shlex
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from quern.cli import main
from quern.demo import write_site
from support.data_pipeline import in_process
from support.documents import PAGES, ROOT, Command, blocks, commands
from support.programs import python

pytestmark = pytest.mark.slow

NOT_RUN = {
    r"make |bash |pip ": "they make an environment, or are these tests",
    r"curl |s3:|^export ": "there is no network",
    r"openssl ": "another program; a file of its own stands for the key",
    r"torchrun |ray\.address": "needs several machines",
    r"quern selftest|python benchmarks/": "minutes",
    r"quern bench|float8": "needs GPUs, or minutes; tests/cli/test_bench.py runs small ones",
    r"quern plan calibrate": "it measures the machine; tests/cli/test_plan_calibrate.py runs it",
    r"quern doctor|preflight=true": "it measures the machine; tests/cli/test_doctor.py runs it",
    r"--max-restarts|replicas\.interval": "needs several GPUs; tests/train/test_chaos.py runs small ones",
    r"replicas\.recompute_interval": "needs several GPUs; tests/distributed/test_recomputation.py runs small ones",
    r"quern train debug": "needs a run that failed; tests/train/test_flight.py has some",
    r"quern train profile": "a minute; tests/cli/test_train_profile.py runs small ones",
    r"--dtype uint|--val --no-eot": "a synopsis: nobody gives all of its options",
    r"quern mix weights": "needs two sources; tests/cli/test_mix.py runs it",
    r"quern mix (ablate|fit)": "needs two sources, or tables; tests/cli/test_mix_laws.py runs them",
    r"quern mix doremi": "needs two sources; tests/train/test_doremi_command.py runs it",
    r"quern mix select": "its target is nothing that the repository has; tests/cli/test_mix.py runs it",
    r"configs/books": "its input is nothing that the repository has",
}
"""Why a command is not run here. test_docs_commands.py parses it nevertheless."""
EXERCISE = ("purge.md", "sh")
"""Of this page and language are the blocks that test_docs_purge.py runs, on other pages of the web."""

TRAINING = """model.preset=debug seq_len=32 global_batch=4 micro_batch=1 precision=fp32 device=cpu compile.enabled=false
 steps=8 schedule.warmup=2 checkpoint.interval=4 checkpoint.keep_last=9 validation.interval=0 metrics.tensorboard=false
 forensics.steps=[3]""".replace("\n", "")
SMALL = {
    r"tokenize\.encoding=gpt2": "tokenize.encoding=trained tokenize.vocab_size=320",
    r"--at 1000000": "--at 100",
    r"other/\*": "out-*/*",
    r"--encoding gpt2": "--encoding trained --ranks runs/cc/tokens/encoding.tiktoken",
    r"^(?!quern plan)(.*)--nproc 8(?!.*--dry-run)": r"\1--nproc 1",
    r"RUN/tokens": "runs/cc/tokens",
    r"(configs/train-125m.yaml \S+)": r"\1 data.0.max_epochs=1000000000",
    r"^(quern train configs/train-125m\.yaml (?!.*--dry-run).*)": rf"\1 {TRAINING}",
    r"\b12000\b": "3",
    r"--at 5000": "--at 4",
    r"steps=8000": "steps=8",
    r"metrics\.trackers=\S+ metrics\.project=small": "",  # an extra
    r"CONFIG (?=parallel)": "configs/llama3-8b.yaml data=[{path: runs/cc/tokens/cc, max_epochs: 1000000000}] ",
    r"RUN (?=--audit)": "../runs/cc ",
    r"/shared/runs/a\b": "runs/cc",
    r"runs/lr2\b": "runs/125m",
    r"/secure": "..",
    r"\bRUN\b": "runs/125m",
    r"\b(?:IN|A)\b": "runs/125m/checkpoints/step_00000004",
    r"\bB\b": "runs/125m/checkpoints/step_00000008",
}
"""What makes a command's work small, and what its placeholders stand for; each after the one before."""


class Shell:
    """Runs commands of quern in this process, in the working folder."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.count = 0

    def typed(self, command: Command) -> list[str]:
        """The words of a command, each folder that it writes with a number of its own."""
        line = command.line.replace("'", '"')
        for told, meant in {**SMALL, **self.names}.items():
            line = re.sub(told, meant, line)
        line = re.sub(r"\bDIR\b", f"out-{self.count}", line)
        self.count += 1
        line = re.sub(r"\bOUT\b|\bout$", f"out-{self.count}", line)
        words = shlex.split(line.replace("[{", "'[{").replace("}]", "}]'"))
        return [name for word in words for name in (sorted(glob.glob(word)) if word.endswith(".bin") else [word])]

    def run(self, words: list[str]) -> tuple[int, str]:
        if words[1] == "train" and "--dry-run" not in words:  # logs to the terminal that it finds when it begins
            command = [python(), "-m", "quern.cli.main", *words[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.returncode, done.stdout + done.stderr
        result = CliRunner().invoke(main._build([words[1]]), words[1:])
        return result.exit_code, f"{result.output}{result.exception or ''}"

    def look(self) -> None:
        """Learn what the data run has: a host and a page of it, a benchmark with a page's text, and where that is."""
        tokenized = pq.read_table("runs/cc/tokens/cc/shard_00000.spans.parquet")["doc_id"].to_pylist()
        urls, texts = (
            dict(zip(table["doc_id"].to_pylist(), table[name].to_pylist(), strict=True))
            for name, table in (("url", ds.dataset("runs/cc/verdicts").to_table()),
                                ("text", ds.dataset("runs/cc/documents").to_table()))
        )  # fmt: skip
        hosts = Counter(urlsplit(urls[document]).hostname for document in tokenized)
        (rarest, _) = hosts.most_common()[-1]
        self.names = {r"https://example\.com/page": urls[tokenized[0]], r"\bexample\.com\b": str(rarest)}
        Path("gsm8k.jsonl").write_text(json.dumps({"question": texts[tokenized[-1]][:400]}))
        code, said = self.run(["quern", "lineage", "match", "runs/cc", "gsm8k.jsonl", "--out", "leaked.parquet"])
        assert code == 0, said


def runnable(page: Path) -> list[Command]:
    shown = [block for block in blocks(page) if block.of_shell and (block.page, block.language) != EXERCISE]
    found = [command for block in shown for command in commands(block)]
    return [command for command in found if not any(re.search(told, command.line) for told in NOT_RUN)]


def test_every_command_that_can_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of README.md make the runs, and each other page begins with them as they were before the purge."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("configs").symlink_to(ROOT / "configs")
    Path("crawl").symlink_to(Path(write_site("site", seed=1, pages=160).folder).absolute() / "warc")
    Path("audit.key").write_bytes(bytes(range(32)))
    shell, failed = Shell(), []
    with in_process.engine():
        for page in PAGES:
            found = runnable(page)
            if found and shell.names:
                trains = any(command.line.startswith("quern train configs/train-125m") for command in found)
                folder = tmp_path / page.stem
                shutil.copytree(
                    tmp_path / "saved", folder / "runs", ignore=shutil.ignore_patterns("125m") if trains else None
                )
                (folder / "configs").symlink_to(ROOT / "configs")
                monkeypatch.chdir(folder)
            for command in found:
                words = shell.typed(command)
                code, said = shell.run(words)
                if code not in ((0, 1) if words[2] == "diff" else (0,)):
                    failed.append(f"{command.page}: {shlex.join(words)}: {code}: {said}")
                if not shell.names and Path("runs/cc/tokens/VERSION.json").exists():
                    shell.look()
                if not (tmp_path / "saved").exists() and Path("runs/125m").exists():
                    shutil.copytree("runs", tmp_path / "saved")
    assert not failed, "\n".join(failed)


def test_what_is_not_run_is_there() -> None:
    lines = [command.line for page in PAGES for block in blocks(page) if block.of_shell for command in commands(block)]
    assert [told for told in NOT_RUN if not any(re.search(told, line) for line in lines)] == []
