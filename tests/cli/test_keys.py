"""The reference of keys against the configs themselves: complete, with true defaults and valid examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel, TypeAdapter
from typer.testing import CliRunner

from quern.cli.main import app
from quern.data_run.config import DataRun
from quern.errors import InputError
from quern.keys import list_keys, select
from quern.train.config import TrainConfig
from quern.train.swarm.config import SwarmConfig
from support.config_page import PAGE, page

BASES: dict[type[BaseModel], dict[str, Any]] = {
    DataRun: {
        "run_dir": "r", "sources": [{"name": "a", "kind": "warc", "paths": "x"}], "extra": ["my_rules:NoPoems"],
    },
    TrainConfig: {
        "run_dir": "r", "data": [{"path": "a"}], "steps": 10, "phases": [{"first_step": 5}],
        "model": {"preset": "mixtral-8x7b", "rope_scaling": {}, "moe": {}},
        "validation": {"sets": [{"name": "a", "path": "b"}]},
    },
    SwarmConfig: {"run_dir": "r", "base": "c.yaml", "runs": 5},
}  # fmt: skip
#: Numbers that are no amount of anything.
NUMBERS = {
    "seed", "duplicates.seed", "sources.N.priority", "toxicity.labels", "data.N.accept_version", "resume.again",
    "z_loss", "model.rope_theta", "model.rope_scaling.factor", "model.rope_scaling.low_freq_factor",
    "model.rope_scaling.high_freq_factor", "model.norm_eps", "optimizer.lr", "optimizer.beta1", "optimizer.beta2",
    "optimizer.eps", "optimizer.weight_decay", "optimizer.clip", "parallel.reshard_after_forward", "parallel.zero",
    "optimizer.experts.weight_decay", "optimizer.router.weight_decay", "experts.balance_loss", "experts.z_loss",
    "experts.bias_rate", "draw.strength",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _my_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that an example names."""
    head = "from quern import Rule\n\nclass NoPoems(Rule):\n"
    rule = f"{head}    max_short_lines: float = 0.8\n    def measure(self, page): ...\n"
    (tmp_path / "my_rules.py").write_text(rule)
    monkeypatch.syspath_prepend(tmp_path)


MODELS = pytest.mark.parametrize("model", BASES, ids=lambda model: model.__name__)


def flat(value: Any, model: Any, name: str = "") -> dict[str, Any]:
    """The values of a config by dotted name, as its dump has them; mappings that are values stay whole."""
    if isinstance(value, BaseModel):
        found = {}
        for key in type(value).model_fields:
            found |= flat(getattr(value, key), None, f"{name}.{key}".lstrip("."))
        return found
    if isinstance(value, list | tuple) and value and isinstance(value[0], BaseModel):
        return flat(value[0], None, name + ".N")
    return {name: value}


@MODELS
def test_every_key_of_a_config_is_there_with_its_default(model: type[BaseModel]) -> None:
    values = flat(model.model_validate(BASES[model]), None)
    sections = ("list of section", "list of text or section")
    keys = {key.name: key for key in list_keys(model) if not key.is_section and key.type not in sections}
    assert keys.keys() == values.keys()
    given = {
        "run_dir",
        "base",
        "runs",
        "sources.N.name",
        "sources.N.kind",
        "sources.N.paths",
        "data.N.path",
        "steps",
        "phases.N.first_step",
        "validation.sets.N.name",
        "validation.sets.N.path",
        *(f"extra.N.{name}" for name in ("rule", "name", "options", "source_digest")),
    }
    for name in keys.keys() - given - {"model.preset"}:
        shown, value = keys[name].default, json.loads(json.dumps(values[name]))
        assert shown is not None
        assert shown == json.dumps(value, ensure_ascii=False)[
            : len(shown.removesuffix("..."))
        ] + "..." * shown.endswith("...")


@MODELS
def test_a_key_that_must_be_given_is_told_from_one_with_a_default(model: type[BaseModel]) -> None:
    required = {key.name for key in list_keys(model) if key.default is None}
    assert (
        required
        == {
            DataRun: {"run_dir", "sources", "sources.N.name", "sources.N.kind", "extra.N.rule"},
            TrainConfig: {
                "run_dir",
                "data",
                "data.N.path",
                "steps",
                "validation.sets.N.name",
                "validation.sets.N.path",
            },
            SwarmConfig: {"run_dir", "base", "runs"},
        }[model]
    )


@MODELS
def test_every_key_has_a_meaning_a_unit_and_an_example_where_it_needs_them(model: type[BaseModel]) -> None:
    for key in list_keys(model):
        assert key.meaning.endswith((".", ")")), key
        assert len(key.meaning) > 10, key
        assert bool(key.unit) == ("number" in key.type or "integer" in key.type) or key.name in NUMBERS, key
        assert key.example or key.type == "section" or key.default not in (None, "null", "[]", "{}", '""'), key


def field_of(model: type[BaseModel], name: str) -> Any:
    """The type of a key, with its bounds, for pydantic alone to judge a value by."""
    head, _, rest = name.replace(".N", "").partition(".")
    field = model.model_fields[head]
    if not rest:
        return Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation  # type: ignore[return-value]
    return field_of(inner_model(field.annotation), rest)


def inner_model(annotation: Any) -> Any:
    if get_origin(annotation) is None:
        return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
    return next((found for part in get_args(annotation) if (found := inner_model(part))), None)


@MODELS
def test_every_example_is_a_valid_value(model: type[BaseModel]) -> None:
    examples = [key for key in list_keys(model) if key.example is not None]
    assert len(examples) > (20 if model is not SwarmConfig else 3)
    for key in examples:
        adapter = TypeAdapter(field_of(model, key.name))
        value = yaml.safe_load(str(key.example))
        adapter.validate_python(float(value) if key.example == "2e8" else value)


def test_the_page_is_what_the_models_say() -> None:
    assert PAGE.read_text() == page(), "docs/config.md: run make docs"


def test_the_type_names_choices_bounds_and_lists() -> None:
    types = {key.name: key.type for key in [*list_keys(DataRun), *list_keys(TrainConfig)]}
    assert types["checkpoint.interval"] == 'integer ≥ 0 or "auto"'
    assert types["language.pre_skip"] == "number or false"
    assert types["schedule.decay"] == "number > 0, ≤ 1"
    assert types["phases.N.weights"] == "list of number ≥ 0 or null"
    assert types["pii.action"] == '"mask" | "measure"'
    assert types["toxicity.labels"] == "mapping of text to number ≥ 0, ≤ 1"


def test_a_section_or_a_key_is_chosen_by_its_name() -> None:
    assert [key.name for key in select(list_keys(DataRun), "ray")] == ["ray", "ray.address"]
    assert [key.name for key in select(list_keys(DataRun), "sources.3.kind")] == ["sources.N.kind"]
    with pytest.raises(InputError, match=r"checkpont: no such key"):
        select(list_keys(TrainConfig), "checkpont")
    with pytest.raises(InputError, match=r"keep_last: no such key; expected one such as checkpoint\.keep_last"):
        select(list_keys(TrainConfig), "keep_last")
    told = CliRunner().invoke(app, ["train", "keys", "checkpoint.keep_last"]).stdout
    assert told.splitlines()[0] == "checkpoint.keep_last  integer ≥ 1  [checkpoints]  default 3"
    told = CliRunner().invoke(app, ["data", "keys", "language.keep"]).stdout
    assert "Example: language.keep=[en, de]" in told
