"""What the parts import beside torch and what torch itself brings, and which of it this Python lacks."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

__all__ = ["NEEDS", "missing", "missing_text"]

#: Of every part: modules, by the wheel that has them. fsspec and typing_extensions come with torch, as a rule.
ALWAYS = {
    "torch": "torch", "numpy": "numpy", "pydantic": "pydantic", "pydantic_core": "pydantic_core",
    "annotated_types": "annotated-types", "typing_inspection": "typing-inspection",
    "typing_extensions": "typing_extensions", "yaml": "PyYAML", "fsspec": "fsspec",
}  # fmt: skip
#: Of the parts that train: pyarrow reads the spans of the tokens.
TRAINING = {**ALWAYS, "pyarrow": "pyarrow"}

NEEDS: dict[str, dict[str, str]] = {
    "selftest": TRAINING, "attention": ALWAYS, "syncs": TRAINING, "float8": ALWAYS, "products": ALWAYS, "loss": ALWAYS,
    "optimizer": ALWAYS, "casts": ALWAYS, "suspicions": ALWAYS, "train": TRAINING, "experts": ALWAYS,
    "checkpoint": TRAINING, "memory": TRAINING,
}  # fmt: skip


def missing(
    parts: Iterable[str], find: Callable[[str], object | None] = importlib.util.find_spec
) -> dict[str, list[str]]:
    """Wheels that are not there, each with the parts that want it."""
    found: dict[str, list[str]] = {}
    known: dict[str, bool] = {}
    for part in parts:
        for module, wheel in NEEDS[part].items():
            if module not in known:
                known[module] = find(module) is not None
            if not known[module]:
                found.setdefault(wheel, []).append(part)
    return found


def missing_text(found: Mapping[str, list[str]], parts: Iterable[str], constraints: Path) -> str:
    """What to carry to the machine, and what runs without."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", constraints.read_text(), re.M)) if constraints.exists() else {}
    alike = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    wanted = [
        f"{wheel}=={alike[name]}" if (name := wheel.lower().replace("_", "-")) in alike and wheel != "torch" else wheel
        for wheel in found
    ]
    every = list(parts)
    lines = [f"this Python lacks {len(found)} of the wheels that the suite needs:"]
    lines += [f"  {pin}  ({'all parts' if len(of) == len(every) else ', '.join(of)})"
              for pin, of in zip(wanted, found.values(), strict=True)]  # fmt: skip
    runs = [part for part in every if not any(part in of for of in found.values())]
    if runs:
        lines.append(f"parts that run without them: {', '.join(f'--part {part}' for part in runs)}")
    lines += [
        "where there is a network, for the Python of this machine:",
        "  python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 "
        "--platform manylinux2014_x86_64 --dest wheels " + " ".join(wanted),
        "then here: python -m pip install --no-index --no-deps wheels/*.whl",
    ]  # fmt: skip
    return "\n".join(lines)
