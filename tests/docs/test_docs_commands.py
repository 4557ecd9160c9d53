"""Commands and configs of the documentation: the programs themselves take every one of them."""

from __future__ import annotations

import re
import shlex
import tomllib
import typing
from pathlib import Path
from unittest import mock

import pytest
import typer
import yaml

from quern.cli import main
from quern.config import load_config
from quern.data_run.config import DataRun
from quern.train.bench.options import parse as parse_bench
from quern.train.config import TrainConfig
from quern.train.profiling import __main__ as profiling
from quern.train.swarm.config import SwarmConfig
from support.documents import PAGES, ROOT, Block, Command, blocks, commands, inline

BLOCKS = [block for page in PAGES for block in blocks(page)]
COMMANDS = [command for block in BLOCKS if block.of_shell for command in commands(block)]
CONFIGS = [block for block in BLOCKS if block.language == "yaml"]
APP = typing.cast(typing.Any, typer.main.get_command(main.app))
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

#: What stands for a number.
NUMBER = re.compile(r"\b(N|ID|R|STEP)$")
#: What stands for a config of these kinds, and for one that a run has written.
READY = {DataRun: ROOT / "configs" / "fineweb-en.yaml", TrainConfig: ROOT / "configs" / "llama3-8b.yaml"}
NAMED = ("CONFIG", "recipe.yaml", "config.yaml")


def parsed(words: list[str]) -> typing.Any:
    """What the parser of ``quern WORDS`` makes of them; nothing is run."""
    context = APP.make_context("quern", list(words))
    while hasattr(context.command, "commands"):
        name, command, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context


def check_config(path: str, overrides: list[str], page: str, model: type) -> None:
    """A config of the repository, of the page or of a run, with overrides."""
    if any(block.page == page and block.name == path for block in BLOCKS):
        path = "CONFIG"  # a test of its own takes the block
    load_config(READY[model] if Path(path).name in NAMED else ROOT / path, model, overrides)


class ParsedError(Exception):
    """A program's arguments are read, and its work would begin."""


def check_module(module: str, arguments: list[str], page: str) -> None:
    """The part behind ``-m``."""
    if module == "quern.train.bench":
        parse_bench(arguments)
    elif module == "quern.train.profiling":
        with mock.patch.object(profiling, "load_train_config", side_effect=ParsedError), pytest.raises(ParsedError):
            profiling.main(arguments)
    elif module == "quern.cli.main":
        check_quern(arguments, page)
    else:
        assert module == "quern.train"
        check_config(arguments[0], arguments[1:], page, TrainConfig)


def check_quern(words: list[str], page: str) -> None:
    if words[0] == "bench" and words[1:]:
        parse_bench([str(READY[TrainConfig]) if word == "CONFIG" else word for word in words[1:]])
        words = words[:1]
    context = parsed([NUMBER.sub("1", word) for word in words])
    given = context.params
    if "overrides" in given and (config := given.get("config", "CONFIG")):
        model = DataRun if context.command_path == "quern data run" else TrainConfig
        check_config(config, list(given["overrides"] or ()), page, model)


def with_its_neighbours(script: Path) -> str:
    """The text of a script and of the modules of its folder that it imports: some define the options of several."""
    text = script.read_text()
    names = re.findall(r"(?m)^(?:from|import) (\w+)", text)
    return "\n".join([text, *(near.read_text() for name in names if (near := script.with_name(f"{name}.py")).exists())])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_a_command_can_be_given(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    match command.words:
        case ["quern", *words]:
            check_quern(words, command.page)
        case ["make", target]:
            assert re.search(rf"(?m)^(?:{target}:|TESTS *:=.* {target}(?: |$))", MAKEFILE)
        case ["make", "test-gpu", given]:
            text = (ROOT / "benchmarks/gpu/suite.py").read_text()
            options = shlex.split(given.removeprefix("ARGS="))
            assert [word for word in options if word.startswith("--") and f'"{word}"' not in text] == []
        case ["torchrun", "--nproc-per-node", "2", example, "train.yaml", "checkpoints"]:
            assert (ROOT / example).exists()  # tests/lineage/test_other_trainers.py runs it
        case ["torchrun", *words]:
            module, *arguments = words[words.index("-m") + 1 :]
            check_module(module, arguments, command.page)
        case ["python", script, *options]:
            text = with_its_neighbours(ROOT / script)
            assert [word for word in options if word.startswith("--") and f'"{word}"' not in text] == []
        case ["pip", "install", "-c", pins, wanted]:
            assert (ROOT / pins).exists()
            assert wanted == ".[all]"
        case ["pip", "install", wanted]:
            assert wanted.removeprefix("quern[").removesuffix("]") in EXTRAS
        case ["bash", script]:
            assert (ROOT / script).exists()
        case [program, *_]:
            assert program in ("curl", "export", "openssl")


def test_commands_in_the_text_are_there() -> None:
    """Some are named without what they need, and some groups with several of their commands."""
    wrong = []
    for command in (command for page in PAGES for command in inline(page)):
        group, *rest = shlex.split(re.sub(r"[\[\]…]|key=value", "", command.line))[1:]
        several = any(word.endswith(",") for word in rest)
        for words in [[word.strip(",")] for word in rest] if several else [rest]:
            try:
                check_quern([group, *words], command.page)
            except Exception as error:
                if type(error).__name__ not in ("BadOptionUsage", "MissingParameter", "NoArgsIsHelpError"):
                    wrong.append(f"{command.page}: {command.line}: {error!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("block", CONFIGS, ids=lambda block: f"{block.page}: {block.text.splitlines()[0]}")
def test_a_config_is_one(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of one stands in a config of three sources of data that has what the part leaves out."""
    (rules,) = (other.text for other in BLOCKS if "class NoPoems" in other.text)
    (tmp_path / "my_rules.py").write_text(rules)
    monkeypatch.syspath_prepend(tmp_path)
    part = yaml.safe_load(block.text)
    model, whole = (DataRun, "fineweb-en") if part.keys() & {"sources", "extra"} else (TrainConfig, "llama3-8b")
    if "base" in part:
        model, whole = SwarmConfig, ""
    file = None if block.name or not whole else ROOT / "configs" / f"{whole}.yaml"
    load_config(file, model, complete=lambda raw: raw.update(part))
