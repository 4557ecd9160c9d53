"""Every mistake in a config is one line that names file, field, value and expectation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field, field_validator

from quern.config import Section, digest, dump_yaml, load_config, parse_overrides
from quern.errors import InputError


class Inner(Section):
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    words: Annotated[tuple[str, ...], Field(min_length=1)] = ("a",)
    min_words: Annotated[int, Field(ge=0)] | None = 50
    mode: Literal["fast", "exact"] = "fast"


class Item(Section):
    name: str
    paths: str | tuple[str, ...] = ()

    @field_validator("name")
    @classmethod
    def _lower(cls, value: str) -> str:
        if value != value.lower():
            raise ValueError(f"expected lower case, got {value!r}")
        return value


class Root(Section):
    run_dir: str
    inner: Inner = Inner()
    sources: tuple[Item, ...] = ()


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    return str(path)


def failure(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(InputError) as caught:
        load_config(write(tmp_path, text), Root, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message.lower()
    return message.replace(str(tmp_path) + "/", "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "run_dir: r\ninner: {threshold:5}",
            "x.yaml: inner.threshold:5: unknown key; YAML wants a space after the colon, as in threshold: 5",
        ),
        ("run_dir: r\ninner: {words: []}", "x.yaml: inner.words: expected at least one item, got []"),
        ("run_dir: r\niner: {}", "x.yaml: iner: unknown key; did you mean 'inner'?"),
        ("run_dir: r\ninner: {treshold: 1}", "x.yaml: inner.treshold: unknown key; did you mean 'threshold'?"),
        ("run_dir: r\nsources: [{name: a, path: b}]", "x.yaml: sources.0.path: unknown key; did you mean 'paths'?"),
        ("run_dir: r\nzzz: 1", "x.yaml: zzz: unknown key; known keys: inner, run_dir, sources"),
        ("inner: {}", "x.yaml: run_dir: missing; this key is required"),
        ("run_dir: r\ninner: {min_words: fifty}", 'x.yaml: inner.min_words: expected an integer, got "fifty"'),
        ("run_dir: r\ninner: {min_words: -1}", "x.yaml: inner.min_words: expected a number ≥ 0, got -1"),
        ("run_dir: r\ninner: {min_words: 1.5}", "x.yaml: inner.min_words: expected an integer, got 1.5"),
        ("run_dir: r\ninner: {threshold: 2}", "x.yaml: inner.threshold: expected a number ≤ 1, got 2"),
        ("run_dir: r\ninner: {threshold: high}", 'x.yaml: inner.threshold: expected a number, got "high"'),
        ("run_dir: r\ninner: {mode: slow}", "x.yaml: inner.mode: expected one of 'fast' or 'exact', got \"slow\""),
        ("run_dir: r\ninner: 3", "x.yaml: inner: expected a mapping of keys, got 3"),
        ("run_dir: [r]", 'x.yaml: run_dir: expected text, got ["r"]'),
        ("run_dir: r\nsources: [{name: A}]", "x.yaml: sources.0.name: expected lower case, got 'A'"),
        ("run_dir: r\nrun_dir: s", "x.yaml: not valid YAML: line 2, column 1: key 'run_dir' is given twice"),
        ("- a\n- b", "x.yaml: expected a mapping of keys at the top, got list"),
    ],
)
def test_mistake_in_the_file_is_named(tmp_path: Path, text: str, expected: str) -> None:
    assert failure(tmp_path, text) == expected


def test_yaml_that_names_code_is_refused_and_does_not_run(tmp_path: Path) -> None:
    told = failure(tmp_path, f"run_dir: !!python/object/apply:os.mkdir ['{tmp_path}/made']")
    assert told.startswith("x.yaml: not valid YAML: line 1, column 10: could not determine a constructor")
    assert not (tmp_path / "made").exists()


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    assert failure(tmp_path, "run_dir: r\ninner: {threshold: 1").startswith("x.yaml: not valid YAML: line ")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("inner.min_words=many", 'x.yaml (override): inner.min_words: expected an integer, got "many"'),
        ("workers", "override 'workers': expected key=value, for example workers=4"),
        ("sources.3.name=a", "override sources.3.name: sources.3: expected a list index, 0 to append, got '3'"),
        ("inner.words.5=a", "override inner.words.5: inner.words.5: expected a list index, 0, or 1 to append, got '5'"),
        ("run_dir.x=1", "override run_dir.x: run_dir is a single value ('r') and has no key 'x'"),
        ("inner.threshold=[", "override 'inner.threshold=[': the value is not YAML"),
    ],
)
def test_mistake_in_an_override_is_named(tmp_path: Path, override: str, expected: str) -> None:
    assert failure(tmp_path, "run_dir: r\nsources: []\ninner: {words: [a]}", override).startswith(expected)


def test_missing_and_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing\.yaml: no such config file"):
        load_config(tmp_path / "nothing.yaml", Root)
    with pytest.raises(InputError, match="is a directory"):
        load_config(tmp_path, Root)
    (tmp_path / "latin.yaml").write_bytes(b"run_dir: \xe9")
    with pytest.raises(InputError, match="not UTF-8"):
        load_config(tmp_path / "latin.yaml", Root)


def test_overrides_reach_nested_keys_and_list_items(tmp_path: Path) -> None:
    path = write(tmp_path, "run_dir: r\nsources: [{name: a, paths: p}]")
    config = load_config(
        path, Root, ["inner.threshold=0.25", "sources.0.paths=[x, y]", "sources.1.name=b", "inner.min_words=null"]
    )
    assert config.inner.threshold == 0.25
    assert config.inner.min_words is None
    assert [s.name for s in config.sources] == ["a", "b"]
    assert config.sources[0].paths == ("x", "y")


def test_an_override_value_may_contain_equals_signs() -> None:
    assert parse_overrides(["a.b=s3://x/y?z=1"]) == [("a.b", "s3://x/y?z=1")]


def test_zero_is_a_value(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "run_dir: r\ninner: {min_words: 0, threshold: 0}"), Root)
    assert config.inner.min_words == 0
    assert config.inner.threshold == 0.0


def test_printed_config_reads_back_to_the_same_value(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "run_dir: 'é: #'\nsources: [{name: a, paths: [b]}]"), Root)
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    again = load_config(tmp_path / "again.yaml", Root)
    assert again == config
    assert digest(again) == digest(config)
    assert yaml.safe_load(dump_yaml(config))["run_dir"] == "é: #"


def test_digest_depends_on_values_and_not_on_key_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('inner: {min_words: "4"}', 'x.yaml: inner.min_words: expected an integer, got "4"'),
        ("inner: {min_words: true}", "x.yaml: inner.min_words: expected an integer, got true"),
        ("inner: {threshold: yes}", "x.yaml: inner.threshold: expected a number, got true"),
        ("inner: {threshold: .nan}", "x.yaml: inner.threshold: expected a finite number, got NaN"),
        ("inner: {threshold: .inf}", "x.yaml: inner.threshold: expected a finite number, got Infinity"),
        ("sources: [{name: 7}]", "x.yaml: sources.0.name: expected text, got 7"),
        ("inner: {{a}: 1}", "x.yaml: not valid YAML: line 2, column 9: {'a': None} cannot be a key"),
    ],
)
def test_a_value_of_another_kind_is_not_made_to_fit(tmp_path: Path, text: str, expected: str) -> None:
    assert failure(tmp_path, f"run_dir: r\n{text}") == expected


def test_a_number_with_an_exponent_needs_no_point_and_a_text_like_one_stays_a_text(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "run_dir: r\ninner: {threshold: 1e-3}"), Root).inner.threshold == 0.001
    config = Root(run_dir="1e-3")
    assert load_config(write(tmp_path, dump_yaml(config)), Root) == config


def test_an_override_may_be_a_glob_that_begins_with_a_star(tmp_path: Path) -> None:
    path = write(tmp_path, "run_dir: r\nsources: [{name: a}]")
    assert load_config(path, Root, ["sources.0.paths=*.warc.gz"]).sources[0].paths == "*.warc.gz"


def test_a_config_that_costs_too_much_is_refused_before_anyone_walks_through_it(tmp_path: Path) -> None:
    bomb = "a0: &a0 [1, 2]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    assert failure(tmp_path, bomb) == "x.yaml: holds more than 1,000,000 keys and values, aliases counted each time"
    assert "recursive" in failure(tmp_path, "run_dir: &own [*own]")
    assert failure(tmp_path, "a: " + "[" * 20_000) == "x.yaml: is nested too deeply"
    assert failure(tmp_path, "run_dir: r", "inner=" + "[" * 20_000) == "override: is nested too deeply"
    assert failure(tmp_path, "#" * (16 << 20) + "#") == "x.yaml: expected at most 16,777,216 characters, has more"
    assert failure(tmp_path, "run_dir: r", "inner=" + "#" * (1 << 20) + "#").startswith(
        "override: expected at most 1,0"
    )
    paths = [f"crawl-data/CC-MAIN-2026-40/segments/1/warc/{number:05}.warc.gz" for number in range(20_000)]
    assert load_config(write(tmp_path, json.dumps({"run_dir": "r", "sources": [{"name": "a", "paths": paths}]})), Root)
    shared = "run_dir: r\nsources: [&one {name: a, paths: [b]}, *one]"
    assert load_config(write(tmp_path, shared), Root).sources == (Item(name="a", paths=("b",)),) * 2
