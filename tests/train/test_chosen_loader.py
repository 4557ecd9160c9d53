"""What the loader reads of chosen documents: every window of every epoch, against lists of tokens laid end to end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.mixtures.order import Order
from quern.tokenize.shards import ShardReader
from quern.train.batches.boundaries import open_boundaries
from quern.train.batches.corpus import Corpus
from quern.train.batches.loader import IGNORE, Loader
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
