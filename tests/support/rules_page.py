"""docs/rules.md, made from the chain and its config: ``python tests/support/rules_page.py`` writes it."""

from __future__ import annotations

from pathlib import Path

from quern.data_pipeline.chain import Chain
from quern.data_pipeline.config import ChainConfig
from quern.data_run.config import DataRun
from quern.keys import Key, list_keys
from quern.lineage.limits import _QUALITY, _ZERO

PAGE = Path(__file__).parents[2] / "docs" / "rules.md"

_HEAD = """# Every rule and column

A rule's name is the name of its verdict column, and the `reason` of a page that it drops. A measurement at a bound
passes. Which families are measured, and in which order, `quality.order` says; `quern data keys KEY` prints a key's
default. `quern lineage show RUN --url URL` prints a page's measurements beside the bounds of its run. `make docs`
writes this page from the code; what the gates are is in [data-run.md](data-run.md#the-chain)."""


def page() -> str:
    """The text of docs/rules.md."""
    keys = {key.name: key for key in list_keys(DataRun)}
    columns = Chain(ChainConfig()).measures
    lines = [_HEAD, "", "| rule and column | fails below | fails above | what the bound means |", "|---|---|---|---|"]
    bounded = []
    for column in columns:
        least, most = bounds(column, keys)
        if least is None and most is None and column not in _ZERO:
            continue
        bounded.append(column)
        told = [key.meaning.replace("``", "`") for key in (least, most) if key is not None]
        told = list(dict.fromkeys(told)) or ["A text without a word fails."]
        cells = (f"`{column}`", *(f"`{key.name}`" if key else "" for key in (least, most)), " ".join(told))
        lines.append("| " + " | ".join(cells) + " |")
    rest = ", ".join(f"`{column}`" for column in columns if column not in bounded)
    lines += ["", f"Measured, and bounded by no rule of its own: {rest}."]
    return "\n".join(lines) + "\n"


def bounds(column: str, keys: dict[str, Key]) -> tuple[Key | None, Key | None]:
    """The keys of the least and the greatest value that pass."""
    family, _, name = column.partition(".")
    section = f"quality.{family}"
    named = {
        "language.guess_score": ("language.pre_skip", None),
        "toxicity.lexicon_density": (None, "toxicity.max_density"),
    }
    if column in named:
        least, most = named[column]
    elif column in _QUALITY:
        least, most = (key and f"{section}.{key}" for key in _QUALITY[column])
    elif column in _ZERO:
        least, most = None, _ZERO[column] and f"{section}.{_ZERO[column]}"
    else:
        least, most = None, f"{section}.{name}" if f"{section}.{name}" in keys else None
    return least and keys[least], most and keys[most]


if __name__ == "__main__":
    PAGE.write_text(page())
