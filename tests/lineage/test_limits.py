"""The limits that a run's config is read to have, beside the rules that judge by them."""

from __future__ import annotations

from typing import Any

import pytest

from quern.data_pipeline.stages.quality import Quality, QualityConfig, decide
from quern.data_pipeline.stages.toxicity import ToxicityConfig
from quern.lineage.limits import config_of, limits
from support.named_cases import with_each
from support.rules_page import PAGE, page

CONFIGS = [
    QualityConfig(),
    QualityConfig.model_validate(
        {
            "order": ["fineweb", "gopher"],
            "gopher": {"min_words": 0, "max_words": None, "min_alpha_word_frac": None, "max_hash_ratio": 0},
            "fineweb": {"line_punct_ratio": None, "list_ratio": 0.05},
        }
    ),
    QualityConfig.model_validate({"c4": {"lorem_ipsum": False, "min_sentences": None}, "order": ["c4", "repetition"]}),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_limits_fail_what_the_rules_fail(config: QualityConfig) -> None:
    """Against the rules themselves, one measurement at a time."""
    known = limits({"quality": config.model_dump(mode="json")})
    names = {name for family in CONFIGS for name in limits({"quality": family.model_dump(mode="json")})}
    assert len(names) > 25
    for name in sorted(names):
        limit = known.get(name)
        for value in (
            0.0,
            0.005,
            0.06,
            0.1,
            0.11,
            0.15,
            0.25,
            0.31,
            0.7,
            0.85,
            1.0,
            2.0,
            3.0,
            5.0,
            10.5,
            49,
            50,
            1e5,
            1e6,
        ):
            outside = limit is not None and (
                (limit.least is not None and value < limit.least) or (limit.most is not None and value > limit.most)
            )
            if name.endswith(".empty"):
                value = float(value > 0)
                outside = limit is not None and limit.most is not None and value > limit.most
            assert outside is (name in decide({name: value}, config)), (name, value)


def test_every_measurement_that_can_fail_a_page_has_a_limit() -> None:
    """So that a rule that is added to a family and not to the limits is seen."""
    config = QualityConfig()
    can_fail = {
        rule
        for name in Quality(config).measures
        for value in (-1.0, 1.0, 1e9)
        for rule in decide({name: value}, config)
    }
    assert len(can_fail) > 25
    assert can_fail == set(limits({"quality": config.model_dump(mode="json")}))


def test_the_page_of_rules_is_what_the_code_says() -> None:
    assert PAGE.read_text() == page(), "docs/rules.md: run make docs"


def test_a_source_with_a_recipe_has_the_recipe_s_limits() -> None:
    run = {"quality": QualityConfig(order=["c4"]).model_dump(mode="json"), "language": {"pre_skip": 0.25}}
    own = {"quality": QualityConfig(order=["gopher"]).model_dump(mode="json")}
    record = {"config": {**run, "sources": [{"name": "plain"}, {"name": "own", "recipe": own}]}}
    assert limits(config_of(record, "plain")) == limits(run)
    assert limits(config_of(record, "own")) == limits({**run, **own})
    assert "language.guess_score" in limits(config_of(record, "own"))


def test_rules_that_only_measure_have_no_limit() -> None:
    assert not limits({"quality": QualityConfig(action="measure").model_dump(mode="json")})
    drop = {"toxicity": ToxicityConfig().model_dump(mode="json"), "language": {"pre_skip": False}}
    assert {name: limit.most for name, limit in limits(drop).items()} == {"toxicity.lexicon_density": 0.02}
    assert not limits({"toxicity": ToxicityConfig(action="measure").model_dump(mode="json")})


@with_each({}, {"quality": 3}, {"quality": {"order": "x", "action": "drop"}}, {"urls": []})
def test_a_config_of_another_shape_gives_fewer_limits(config: dict[str, Any]) -> None:
    assert limits(config) == {}
