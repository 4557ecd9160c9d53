"""What the loader reads of chosen documents: every window of every epoch, against lists of tokens laid end to end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.errors import InputError
from quern.mixtures.order import Order
from quern.tokenize.shards import ShardReader
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.held_out import open_held_out
from quern.train.batches.loader import IGNORE, Loader
from quern.train.config import TrainConfig
from support.train.chosen_site import Site, write_site

WHERES = {
    "tokens <= 4": lambda row: row["tokens"] <= 4,
    "tokens > 4 and doc_id > '3'": lambda row: row["tokens"] > 4 and row["doc_id"].hex() > "3",
}
LENGTH, BATCH = 8, 4


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return write_site(tmp_path)


def laid_out(site: Site, fulfils: Any) -> tuple[list[int], list[int]]:
    """Tokens, and of each the number of its document."""
    reader = ShardReader(site.path)
    tokens = reader.tokens(0, reader.total_tokens).tolist()
    kept = [row for row in site.rows if fulfils(row)]
    spans = [tokens[row["start"] : row["start"] + row["tokens"]] for row in kept]
    return [token for span in spans for token in span], [n for n, span in enumerate(spans) for _ in span]


@pytest.mark.parametrize("document_mask", [True, False])
def test_every_window_holds_the_chosen_documents(site: Site, tmp_path: Path, document_mask: bool) -> None:
    corpus = Corpus([site.path] * 2, LENGTH, list(WHERES), [str(tmp_path / "chosen")])
    order = Order([1, 2], corpus.windows, 3, ids=corpus.ids, seq_len=LENGTH, global_batch=BATCH)
    loader = Loader(
        corpus, order, rank=0, world=1, micro_batch=BATCH, document_mask=document_mask,
        boundaries=open_boundaries(corpus.readers, str(tmp_path / "index"), corpus.chosen),
    )  # fmt: skip
    wholes = [laid_out(site, fulfils) for fulfils in WHERES.values()]
    seen: list[set[tuple[int, int]]] = [set(), set()]
    for step in range(2 * sum(corpus.windows) // BATCH):
        (batch,) = loader.take(step).micro_batches
        for row, (source, epoch, window) in enumerate(
            zip(batch.sources.tolist(), batch.epochs.tolist(), batch.windows.tolist(), strict=True)
        ):
            seen[source].add((epoch, window))
            tokens, documents = wholes[source]
            at = window * LENGTH
            own, of = tokens[at : at + LENGTH + 1], documents[at : at + LENGTH + 1]
            assert batch.tokens_BL[row].tolist() == own[:-1]
            first = [a != b if document_mask else False for a, b in pairwise(of)]
            targets = [IGNORE if head else token for token, head in zip(own[1:], first, strict=True)]
            assert batch.targets_BL[row].tolist() == targets
            numbers = np.cumsum([0, *first[:-1]])
            assert batch.documents_BL[row].tolist() == numbers.tolist()
    for source, (tokens, _) in enumerate(wholes):
        assert {(0, window) for window in range((len(tokens) - 1) // LENGTH)} <= seen[source]
    loader.close()


def test_held_out_documents_are_those_of_each_condition(tmp_path: Path) -> None:
    site = write_site(tmp_path, held_out=(4, 9, 40, 3, 11, 4))

    def held_out(*wheres: str) -> list[int]:
        data = [{"path": site.path, "where": where} for where in wheres]
        config = TrainConfig.model_validate({
            "run_dir": str(tmp_path / "train"), "data": data, "model": {"preset": "debug"}, "seq_len": 8, "steps": 3,
        })  # fmt: skip
        return [own.corpus.tokens[0] for own in open_held_out(config)]

    assert held_out("tokens <= 4", "tokens > 4") == [11, 60]
    assert held_out("tokens <= 3", "tokens > 4") == [60]  # 3 tokens are no window
    assert held_out("language = 'de'", "language = 'en'") == []
    with pytest.raises(InputError, match=r"web\.val: where: .* both choose the document at token 13;"):
        held_out("tokens <= 4 or tokens = 40", "tokens between 5 and 40")  # apart but for one that is held out
