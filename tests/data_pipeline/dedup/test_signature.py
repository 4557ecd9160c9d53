from __future__ import annotations

import datasketch
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from dedup_oracle import minhash_hash

from quern.data_pipeline.dedup import signature as module
from quern.data_pipeline.dedup.config import DuplicatesConfig
from quern.data_pipeline.dedup.signature import NUM_WORDS, SCHEME, Signature, minhash, permutations
from quern.data_pipeline.page.document import SIGNATURE_SCHEMA, Page
from support.named_cases import with_each


def page_of(text: str | None) -> Page:
    return Page(source="web", source_file="f", relative_path="f", position=0, text=text)


def text_of(seed: int, num_words: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(f"Wort{chr(0x400 + i)}" for i in rng.integers(0, 400, num_words))


def sketch(plain, text: str, config: DuplicatesConfig) -> datasketch.MinHash:
    made = datasketch.MinHash(config.num_perm, seed=config.seed, hashfunc=minhash_hash, scheme=SCHEME)
    made.update_batch([" ".join(words).encode() for words in plain.plain_shingles(text, config.ngram)])
    return made


@with_each(
    (128, 1, 5, 5), (128, 1, 5, 300), (128, 7, 5, 1500), (112, 0, 3, 200), (1, 2**32 - 1, 1, 50), (300, 3, 8, 90)
)
def test_a_signature_is_bit_for_bit_that_of_datasketch(num_perm, seed, ngram, num_words, *, plain) -> None:
    config = DuplicatesConfig(num_perm=num_perm, seed=seed, ngram=ngram, bands=1, rows=1)
    text = text_of(seed, num_words)
    signature = Signature(config)(page_of(text)).signature
    assert signature is not None
    assert signature.dtype == np.uint32
    assert signature.tolist() == sketch(plain, text, config).hashvalues.tolist()


def test_a_signature_read_back_from_its_table_loads_as_a_datasketch_minhash(plain, tmp_path):
    config = DuplicatesConfig()
    a, b = text_of(0, 400), text_of(0, 400)[200:] + " " + text_of(1, 40)
    pages = [Signature(config)(page_of(text)) for text in (a, b)]
    rows = [{"doc_id": page.doc_id, "signature": page.signature, "shingles": page.shingles} for page in pages]
    pq.write_table(pa.Table.from_pylist(rows, SIGNATURE_SCHEMA), tmp_path / "signatures.parquet")
    loaded = [
        datasketch.MinHash(num_perm=128, seed=1, hashvalues=row["signature"], scheme="affine32")
        for row in pq.read_table(tmp_path / "signatures.parquet").to_pylist()
    ]
    own = [sketch(plain, text, config) for text in (a, b)]
    assert loaded[0] == own[0]
    assert loaded[0].jaccard(loaded[1]) == own[0].jaccard(own[1])
    assert 0.5 < loaded[0].jaccard(own[1]) < 1
    loaded[1].merge(loaded[0])
    assert loaded[1] == datasketch.MinHash.union(*own)


def test_shingles_permuted_in_chunks_have_the_least_values_of_all(monkeypatch):
    shingles = np.random.default_rng(5).integers(0, 2**64, 3000, dtype=np.uint64)
    monkeypatch.setattr(module, "_CHUNK", 7000)
    whole = minhash(shingles, 64, 1)
    monkeypatch.setattr(module, "_CHUNK", 129)
    assert (minhash(shingles, 64, 1) == whole).all()


@with_each((1, 0), (16, 1), (128, 1), (256, 2**32 - 1))
def test_permutations_are_those_that_datasketch_draws(num_perm, seed) -> None:
    expected = datasketch.MinHash(num_perm=num_perm, seed=seed, scheme=SCHEME).permutations
    for ours, theirs in zip(permutations(num_perm, seed), expected, strict=True):
        assert ours.dtype == theirs.dtype == np.uint32
        assert (ours[:, 0] == theirs).all()


def test_other_seeds_are_other_permutations():
    shingles = np.arange(50, dtype=np.uint64)
    assert (minhash(shingles, 128, 1) != minhash(shingles, 128, 2)).sum() > 120
    assert (permutations(128, 1)[0] % 2 == 1).all()


def test_estimates_have_the_error_of_128_permutations():
    """300 pairs at J = 2/3: the standard deviation of an estimate is √(J(1−J)/128) = 0.0417, the bias none."""
    rng = np.random.default_rng(11)
    errors = []
    for seed in range(300):
        values = rng.integers(0, 2**64, 600, dtype=np.uint64)
        a, b = minhash(values[:500], 128, seed), minhash(values[100:], 128, seed)
        errors.append((a == b).mean() - 2 / 3)
    assert abs(np.mean(errors)) < 0.01
    assert 0.034 < np.std(errors) < 0.050


def test_the_stage_measures_words_and_keeps_sorted_unique_shingles(plain):
    text = "the cat sat on the mat, the cat sat on the mat, The Cat sat on a mat 12.5 times"
    page = Signature(DuplicatesConfig())(page_of(text))
    assert page.measures == {NUM_WORDS: float(len(plain.plain_words(text)))}
    assert page.shingles is not None
    assert page.shingles.dtype == np.uint64
    assert page.shingles.tolist() == sorted(set(page.shingles.tolist()))
    assert len(page.shingles) == len(plain.plain_shingles(text, 5))
    assert Signature.measures == tuple(page.measures)
    assert (page.stage, page.failures) == (None, [])


@with_each(None, "", "one two three four", "*** *** *** *** ***")
def test_a_text_too_short_for_a_shingle_has_no_signature(text) -> None:
    page = Signature(DuplicatesConfig())(page_of(text))
    assert page.signature is None
    assert page.shingles is None
    assert page.measures[NUM_WORDS] == len((text or "").replace("*", "").split())


def test_without_a_near_pass_only_words_are_counted():
    page = Signature(DuplicatesConfig(near=False))(page_of(text_of(0, 50)))
    assert (page.signature, page.shingles, page.measures[NUM_WORDS]) == (None, None, 50.0)


def test_the_same_page_twice_is_the_same_signature():
    stage = Signature(DuplicatesConfig())
    first = stage(page_of(text_of(2, 100))).signature
    stage(page_of(text_of(3, 1000)))
    assert (stage(page_of(text_of(2, 100))).signature == first).all()
