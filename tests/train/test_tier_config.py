"""Which settings of checkpoints' tiers go together, and that what was resolved is read again as it was written."""

from __future__ import annotations

import re

import pytest

from quern.config import dump_yaml, load_config
from quern.errors import InputError
from quern.train.config import TrainConfig

LOCAL, STORE = "checkpoint.local=/nvme/{node}/quern", "checkpoint.store=s3://bucket/run"


@pytest.fixture
def load(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: run\nsteps: 10\ndata: [{path: tokens/web}]\n")
    return lambda *overrides: load_config(file, TrainConfig, overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["checkpoint.local=nvme/quern"], "local: expected an absolute path on each node's own disk, got 'nvme/quern'"),
        (["checkpoint.local='{node}/x'"], "local: expected an absolute path on each node's own disk, got '{node}/x'"),
        (["checkpoint.local=''"], "local: expected an absolute path on each node's own disk, got ''"),
        *(
            ([f"checkpoint.local='{path}'"], f"local: expected {{node}} and no other braces, got '{path}'")
            for path in (
                "/nvme/{rank}", "/nvme/{}", "/nvme/{node", "/nvme/node}", "/nvme/{{node}}", "/nvme/{node}{host}",
                "/nvme/{node!r}", "/nvme/{node:03}", "/nvme/{ node }",
            )
        ),
        (["checkpoint.partner=true"], "partner: expected with local only; without it all nodes share the files"),
        ([STORE, "checkpoint.partner=true"], "partner: expected with local only"),
        (["checkpoint.store_every=4"], "store_every: expected with store only"),
        ([LOCAL, "checkpoint.store_every=4"], "store_every: expected with store only"),
        (["checkpoint.store_bytes_per_s=1e9"], "store_bytes_per_s: expected with store only"),
        ([STORE, "checkpoint.store_every=0"], "checkpoint.store_every"),
        ([STORE, "checkpoint.store_bytes_per_s=0"], "checkpoint.store_bytes_per_s"),
        (["checkpoint.upload_wait_s=-1"], "checkpoint.upload_wait_s"),
        (["checkpoint.uploads_wait_s=1"], "checkpoint.uploads_wait_s"),
        (["resume.from_store=true"], "resume.from_store: expected only together with checkpoint.store"),
        ([LOCAL, "resume.from_store=true"], "resume.from_store: expected only together with checkpoint.store"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(load, overrides, expected):
    with pytest.raises(InputError, match=re.escape(expected)) as error:
        load(*overrides)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [LOCAL],
        [LOCAL, "checkpoint.partner=false"],
        [LOCAL, "checkpoint.partner=true"],
        ["checkpoint.partner=false"],  # says what is so
        ["checkpoint.local=/nvme/quern", STORE, "checkpoint.upload_wait_s=0"],
        ["checkpoint.local='/nvme/{node}/{node}'"],
        [STORE, "resume.from_store=true"],
        [STORE, "checkpoint.store_every=4", "checkpoint.store_bytes_per_s=2.5e8", "checkpoint.upload_wait_s=1.5"],
    ],
)
def test_what_was_resolved_is_read_again(load, tmp_path, overrides):
    config = load(*overrides)
    file = tmp_path / "config.yaml"
    file.write_text(dump_yaml(config))
    again = load_config(file, TrainConfig)
    assert again == config
    assert dump_yaml(again) == dump_yaml(config)


def test_the_values_that_are_given_arrive(load):
    config = load(
        LOCAL, STORE, "checkpoint.partner=false", "checkpoint.store_every=4", "checkpoint.store_bytes_per_s=2.5e8",
        "checkpoint.upload_wait_s=1.5", "resume.from_store=true",
    )  # fmt: skip
    found = config.checkpoint
    assert (found.local, found.partner, found.store) == ("/nvme/{node}/quern", False, "s3://bucket/run")
    assert (found.store_every, found.store_bytes_per_s, found.upload_wait_s) == (4, 2.5e8, 1.5)
    assert config.resume.from_store is True


def test_without_any(load):
    found = load().checkpoint
    assert (found.local, found.partner, found.store, found.store_every, found.store_bytes_per_s) == (None,) * 5
