"""docs/config.md, made from the models of the configs: ``python tests/support/config_page.py`` writes it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from quern.data_run.config import DataRun
from quern.keys import Key, list_keys
from quern.train.config import TrainConfig
from quern.train.swarm.config import SwarmConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"

_HEAD = """# Every key of a config

`quern data keys [PREFIX]`, `quern train keys [PREFIX]` and `quern mix keys [PREFIX]` print the same. A key is given in
the YAML file, or as `key=value` after it, dotted: `sources.0.paths=crawl/*.warc.gz`. `N` stands for the number of an
entry, from 0. `null` is "not set"; a key without a unit is a plain number, a text or a choice. `make docs` writes this
page from the code."""


def page() -> str:
    """The text of docs/config.md."""
    data, train = markdown(list_keys(DataRun)), markdown(list_keys(TrainConfig))
    swarms = "## Swarms: `quern mix ablate SPEC`", markdown(list_keys(SwarmConfig))
    runs = ("## Data runs: `quern data run CONFIG`", data, "## Training runs: `quern train CONFIG`", train)
    return "\n\n".join((_HEAD, *runs, *swarms)) + "\n"


def markdown(keys: list[Key]) -> str:
    """The keys as tables of Markdown, one per section."""
    lines: list[str] = []
    told = {key.name: key.meaning for key in keys}
    values = [key for key in keys if not key.is_section]
    first: dict[str, int] = {}  # keys of the top come first, those of a section where its first one is
    for at, key in enumerate(values):
        first.setdefault(_section(key), at if "." in key.name else -1)
    for section, group in groupby(sorted(values, key=lambda key: first[_section(key)]), key=_section):
        of = section.removesuffix(".N")
        lines += [f"### `{section}`", "", told[of], ""] if section else []
        lines += ["| key | type | default | unit | meaning | example |", "|---|---|---|---|---|---|"]
        for key in group:
            default = "must be given" if key.default is None else f"`{key.default}`"
            cells = (f"`{key.name}`", key.type, default, key.unit or "", key.meaning.replace("``", "`"),
                     "" if key.example is None else f"`{key.example}`")  # fmt: skip
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def _section(key: Key) -> str:
    return key.name.rpartition(".")[0]


if __name__ == "__main__":
    PAGE.write_text(page())
