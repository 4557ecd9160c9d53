"""The pages of documentation, and the blocks that they show."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "ROOT", "Block", "Command", "blocks", "commands", "inline"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))

_BLOCK = re.compile(r"^( *)```(\w*)(?: (\S+))?\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_PROGRAM = re.compile(r"(\$ )?(quern|make|torchrun|python|pip|curl|openssl|export|bash) ")
_OPTIONAL = re.compile(r"\[(--[^\]]+)\]")
_ONE_OF = re.compile(r"\w+(?:\|\w+)+")


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    name: str
    text: str

    @property
    def of_shell(self) -> bool:
        return self.language in ("sh", "bash", "console") or (not self.language and bool(_PROGRAM.match(self.text)))


@dataclass(frozen=True)
class Command:
    page: str
    line: str
    """As it is typed: continued lines are one, and a synopsis is one of the commands that it stands for."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line)


def blocks(page: Path) -> list[Block]:
    found = _BLOCK.findall(page.read_text())
    return [Block(page.name, language, name, text) for _, language, name, text in found]


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block of shell. Every line of it is one, or goes on with the one before."""
    for line in re.sub(r"(\\)?\n +", " ", block.text).splitlines():
        bare = shlex.join(shlex.split(line, comments=True))
        if not bare:
            continue
        assert _PROGRAM.match(line), f"{block.page}: not a command: {line}"
        typed = line.removeprefix("$ ").split(" #")[0].strip()
        typed = _OPTIONAL.sub(r"\1", typed).replace("…", "").replace(" key=value", "")
        choices = [one.split("|") for one in _ONE_OF.findall(typed)]
        for chosen in itertools.product(*choices):
            given = iter(chosen)
            yield Command(block.page, " ".join(_ONE_OF.sub(lambda _, given=given: next(given), typed).split()))


def inline(page: Path) -> list[Command]:
    """Commands of quern in the running text."""
    text = _BLOCK.sub("", page.read_text())
    return [Command(page.name, " ".join(found.split())) for found in re.findall(r"`(quern [^`]+)`", text)]
