"""quern turns a web crawl into tokens, and tokens into a language model."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Name → the module that has it, imported when the name is first asked for.
_PUBLIC = {
    "Rule": "quern.data_pipeline.stages.extra.rules",
    "batches": "quern.train.training_batches",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
