"""quern turns a web crawl into tokens, and tokens into a language model.

``docs/python.md`` shows what Python code does with the names here; each is imported when it is first used.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

#: Name → the module that has it, imported when the name is first asked for; ``__init__.pyi`` has their types.
_PUBLIC = {
    "InputError": "quern.errors",
    "Lineage": "quern.lineage.answers.lineage",
    "QuernError": "quern.errors",
    "Rule": "quern.data_pipeline.stages.extra.rules",
    "ShardReader": "quern.tokenize.shards",
    "batches": "quern.train.training_batches",
    "run_data": "quern.data_run.run",
}

__all__ = [
    "InputError", "Lineage", "QuernError", "Rule", "ShardReader", "__version__", "batches", "run_data",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
