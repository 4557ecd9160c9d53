"""An encoding trained on the run's own documents."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quern.data_pipeline.execution.engine import InProcess
from quern.tokenize.encoding import TokenizeConfig, load_encoding
from quern.tokenize.writing import run as run_module
from quern.tokenize.writing import train_encoding
from quern.tokenize.writing.run import run
from quern.tokenize.writing.train_encoding import train_ranks

SYLLABLES = ["ka", "lo", "mi", "ter", "ba", "sun", "ver", "dol", "ing", "est", "ra", "né", "北", "京"]


def made_up_texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(400)]
    return [
        " ".join(rng.choices(words, k=60)) + f".\n\n{rng.random()}  {'ab' * rng.randint(1, 9)}" for _ in range(count)
    ]


def check_ids(path: Path, texts: list[str], held_out: list[str], vocab_size: int) -> None:
    """Against what the library trains on the same texts, without our end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    path.write_bytes(train_ranks(texts, vocab_size))
    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, min_frequency=2, show_progress=False, initial_alphabet=alphabet
    )
    theirs.train_from_iterator(texts, trainer)
    ours = load_encoding("trained", str(path))
    assert ours.vocab_size == vocab_size
    assert ours.eot_id == vocab_size - 1 == theirs.get_vocab_size()
    for text in held_out:
        assert ours.encode(text).tolist() == theirs.encode(text).ids
        assert ours.decode(ours.encode(text)) == text


def test_ids_are_those_of_the_trained_tokenizer(tmp_path: Path) -> None:
    held_out = [*made_up_texts(50, 2), "aaaa  bb\n\n c'll <|endoftext|> ☃ 12345"]
    check_ids(tmp_path / "own.tiktoken", made_up_texts(200, 1), held_out, 600)


@pytest.mark.long
@pytest.mark.shared
def test_ids_on_real_text_are_those_of_the_trained_tokenizer(shared: Path, tmp_path: Path) -> None:
    import gzip
    import json

    with gzip.open(shared / "data" / "text" / "multilingual.jsonl.gz", "rt") as lines:
        texts = [json.loads(line)["text"][:2_000] for line in lines]
    check_ids(tmp_path / "own.tiktoken", texts[::2], texts[1::2], 4_000)


@pytest.mark.slow
def test_two_processes_train_the_same_bytes() -> None:
    program = (
        "import sys, random, hashlib\n"
        "from quern.tokenize.writing.train_encoding import train_ranks\n"
        "rng = random.Random(5)\n"
        "words = [''.join(rng.choices('abcdefgh', k=rng.randint(1, 6))) for _ in range(3000)]\n"
        "texts = [' '.join(rng.choices(words, k=40)) for _ in range(400)]\n"
        "print(hashlib.sha256(train_ranks(texts, 700)).hexdigest())\n"
    )
    digests = set()
    for hash_seed, threads in (("0", "1"), ("1", "4")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        digests.add(result.stdout)
    assert len(digests) == 1


def test_training_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    train_ranks(["a text"], 300)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert "RAYON_NUM_THREADS" not in os.environ


def test_no_text_gives_the_bytes_alone(tmp_path: Path) -> None:
    path = tmp_path / "own.tiktoken"
    path.write_bytes(train_ranks([], 1_000))
    assert load_encoding("trained", str(path)).vocab_size == 257


def test_a_run_trains_on_its_lowest_hashes_whatever_the_partitions(
    make_run: Callable, make_doc: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = 4_000
    monkeypatch.setattr(run_module, "SAMPLE_BYTES", budget)
    rng = random.Random(3)
    texts = made_up_texts(60, 4)
    docs = [make_doc(rng.randbytes(16), text, kept=rng.random() < 0.9) for text in texts]
    removed = [d.doc_id for d in docs[::7]]
    seed, share = 11, 0.2

    def keyed(purpose: str, doc_id: bytes) -> int:
        data = str(seed).encode() + b"\0" + purpose.encode() + b"\0" + doc_id
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")

    sample, size = [], 0
    for doc in sorted(docs, key=lambda d: keyed("encoding", d.doc_id)):
        if (
            doc.kept
            and doc.doc_id not in removed
            and keyed("validation", doc.doc_id) >= share * 2**64
            and size < budget
        ):
            sample.append(doc.text)
            size += len(doc.text.encode())
    assert 3 < len(sample) < 40
    config = TokenizeConfig(encoding="trained", vocab_size=400, validation=share)
    splits = [{("web", "p0"): docs}, {("web", f"q{i}"): docs[i::5] for i in (3, 1, 0, 4, 2)}]
    for number, split in enumerate(splits):
        run_dir = tmp_path / f"run{number}"
        names = make_run(run_dir, split, removed)
        run(str(run_dir), names, config, seed, InProcess(), str(run_dir / ".work"))
        assert (run_dir / "tokens" / "encoding.tiktoken").read_bytes() == train_ranks(sample, 400)


def test_one_document_adds_only_its_beginning(
    make_run: Callable, make_doc: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_encoding, "DOCUMENT_CHARS", 30)
    docs = [make_doc(b"0" * 16, "ab " * 10 + "xyxyxyxyxyxyxyxyxy")]
    names = make_run(tmp_path, {("web", "p"): docs})
    config = TokenizeConfig(encoding="trained", vocab_size=400, validation=0)
    run(str(tmp_path), names, config, 0, InProcess(), str(tmp_path / ".work"))
    assert (tmp_path / "tokens" / "encoding.tiktoken").read_bytes() == train_ranks(["ab " * 10], 400)
