"""The rows of the suite, part by part: sizes, limits, and what a CPU cannot run. Imports no torch.

The most telling come first: what comes last may find no time in a call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runner import Row

__all__ = ["PARTS", "rows"]

SCALINGS = ("tensorwise", "rowwise", "blockwise")
NEEDS_CUDA = "needs CUDA"

#: Llama 3.1 8B's widths, and next to nothing that all recipes of FP8 can take.
WIDE = {"model": {"preset": "llama3-8b", "num_layers": 8}, "vocab_size": 128_256, "backend": "inductor"}
SLIM = {"model": {"preset": "debug", "num_layers": 1}, "vocab_size": 512, "backend": "eager"}


def rows(device: str, small: bool) -> list[Row]:
    """Every row, in the order of :data:`PARTS`."""
    base = {**(SLIM if small else WIDE), "device": device}
    found = [row for part in PARTS.values() for row in part(base, small)]
    return [replace(row, limit_s=240) for row in found] if small else found


def _on(base: dict[str, Any]) -> str | None:
    return None if base["device"] == "cuda" else NEEDS_CUDA


def _selftest(base: dict[str, Any], small: bool) -> list[Row]:
    share = 50 if small else 2
    return [
        Row("selftest", f"one rank, {first + 1} of {share}", "parts.selftest:cases",
            {"device": base["device"], "first": first, "every": share}, 240)
        for first in range(1 if small else share)
    ]  # fmt: skip


def _attention(base: dict[str, Any], small: bool) -> list[Row]:
    sizes = {**base, "batch": 2, "length": 40 if small else 1000}
    found = []
    for backend, dtypes in (
        ("sdpa", ("float64", "float32", "bfloat16")),
        ("varlen", ("bfloat16", "float16")),
        ("flex", ("float32", "bfloat16", "float64")),
    ):
        for dtype in dtypes:
            if not (small and backend == "sdpa" and dtype != "float64"):
                found.append(Row("attention", f"{backend}, {dtype}", "parts.attention:agreement",
                                 {**sizes, "backend": backend, "dtype": dtype}, 120,
                                 None if backend == "sdpa" else _on(base)))  # fmt: skip
    for name, dtypes in (("FA3", ("bfloat16", "float16")), ("FA4", ("bfloat16",))):
        for dtype in dtypes:
            spec = {**sizes, "backend": "varlen", "flash": name, "dtype": dtype}
            found.append(Row("attention", f"{name}, {dtype}", "parts.attention:agreement", spec, 120, _on(base)))
    long = {**base, "batch": 2, "length": 64 if small else 4096, "document": 24 if small else 600}
    return [*found, Row("attention", "speed", "parts.attention:speed", long, 120, _on(base))]


def _syncs(base: dict[str, Any], small: bool) -> list[Row]:
    spec = {
        **base, "model": {"preset": "debug", "num_layers": 2} if small else {"preset": "125M"}, "batch": 4,
        "seq_len": 64 if small else 1024, "vocab_size": 512 if small else 50_257, "steps": 6, "mean_document": 300,
    }  # fmt: skip
    compiled = {"enabled": True, "backend": spec["backend"]}
    cases: dict[str, dict[str, Any]] = {
        "bf16": {"precision": "bf16"},
        "bf16, no document masks": {"precision": "bf16", "document_mask": False},
        "bf16, compiled": {"precision": "bf16", "compile": compiled},
        **{f"{scaling}, compiled": {"precision": "bf16", "compile": compiled, "float8": {"recipe": scaling}}
           for scaling in SCALINGS},
        "spikes skipped": {"precision": "bf16", "guard": {"spike": "skip"}, "z_loss": 1e-4},
        "fp16": {"precision": "fp16"},
    }  # fmt: skip
    if small:
        cases = {"bf16": cases["bf16"]}
    return [
        Row("syncs", name, "parts.syncs:waits", {**spec, "changes": changes}, 150) for name, changes in cases.items()
    ]


def _float8(base: dict[str, Any], small: bool) -> list[Row]:
    spec = {**base, "tokens": 256 if small else 8192}
    return [
        Row("float8", scaling, "parts.float8:products", {**spec, "scaling": scaling}, 120)
        for scaling in (SCALINGS[-1:] if small else SCALINGS)
    ]  # fmt: skip


def _products(base: dict[str, Any], small: bool) -> list[Row]:
    spec = {**base, "tokens": 256 if small else 8192, "square": 256 if small else 8192}
    copy = Row("products", "copy", "parts.products:copy", {**base, "bytes": 1 << 20 if small else 1 << 30}, 60)
    ceilings = Row("products", "alone", "parts.products:ceilings", spec, 120)
    return [ceilings] if small else [copy, ceilings]


def _loss(base: dict[str, Any], small: bool) -> list[Row]:
    right = {**base, "tokens": 96 if small else 512, "chunk": 40 if small else 200}
    speed = {**base, "tokens": 256 if small else 8192, "chunk": 128 if small else 4096}
    rows = [Row("loss", "beside float64", "parts.loss:right", right, 120),
            Row("loss", "alone", "parts.loss:speed", speed, 120)]  # fmt: skip
    return rows[:1] if small else rows


def _optimizer(base: dict[str, Any], small: bool) -> list[Row]:
    rows = [
        Row("optimizer", "beside float64", "parts.optimizer:right", {**base, "blocks": 1, "clip": 1.0}, 90),
        Row("optimizer", "BF16 beside float64", "parts.optimizer:right",
            {**base, "blocks": 1, "clip": 1.0, "bf16": True}, 90),
        Row("optimizer", "alone", "parts.optimizer:adamw", {**base, "blocks": 4}, 90),
        Row("optimizer", "BF16 alone", "parts.optimizer:adamw", {**base, "blocks": 4, "bf16": True}, 90),
    ]  # fmt: skip
    return rows[:2] if small else rows


def _casts(base: dict[str, Any], small: bool) -> list[Row]:
    activations = Row("casts", "activations", "parts.casts:casts", {**base, "tokens": 256 if small else 8192}, 120)
    model = base["model"] if small else {**base["model"], "num_layers": 2}
    spec = {**base, "model": model, "length": 64 if small else 4096, "bound": 0.02}
    kept = [
        Row("casts", f"{name}, {scaling or 'bf16'}", f"parts.weights:{function}", {**spec, "scaling": scaling}, 150)
        for name, function in (("kept weights", "refresh"), ("added gradients", "gradients"))
        for scaling in ((None,) if small else (None, *SCALINGS))
    ]
    return [activations, *kept]


def _suspicions(base: dict[str, Any], small: bool) -> list[Row]:
    tokens = [512] if small else [8192, 32_768, 131_072]
    return [
        Row("suspicions", "sums of BF16 products", "parts.suspicions:reduction", {**base, "tokens": tokens}, 120,
            _on(base)),
        Row("suspicions", "amax, compiled and eager", "parts.suspicions:amaxes",
            {**base, "length": 64 if small else 2048}, 180),
        Row("suspicions", "NaN of cuDNN's gradients", "parts.suspicions:cudnn", {**base, "lengths": [1024, 1088]}, 90,
            _on(base)),
    ]  # fmt: skip


def _train(base: dict[str, Any], small: bool) -> list[Row]:
    common = {
        "device": base["device"], "backend": base["backend"], "peak_tflops": None, "documents": False,
        "checkpointing": "none", "precision": "bf16", "model": "8B-width", "layers": 8, "seq_len": 4096,
        "micro_batches": [2, 1], "accumulate": 4, "steps": 8, "warm_up": 3, "weights_cast": "auto",
    }  # fmt: skip
    if small:
        common |= {"model": "tiny", "layers": 1, "seq_len": 32, "micro_batches": [2], "accumulate": 2, "steps": 2,
                   "warm_up": 1}  # fmt: skip
    sparse = {"model": "30B-A3B-width", "layers": 6, "micro_batches": [4, 2, 1]}
    llama_1b = {"model": "1B", "layers": None, "micro_batches": [8, 4, 2], "accumulate": 2}

    def own(name: str, **changes: Any) -> Row:
        return Row("train", name, "parts.train:quern", {**common, **changes}, 300)

    def peer(name: str, **changes: Any) -> Row:
        return Row("train", name, "parts.train:transformers", {**common, **changes}, 300)

    if small:
        sparse = {"model": "tiny, experts"}
        return [own("tiny, bf16"), peer("tiny, transformers"), own("tiny, experts, bf16", **sparse),
                peer("tiny, experts, transformers", **sparse)]  # fmt: skip
    return [
        own("bf16"),
        peer("transformers"),
        *(own(f"fp8-{scaling}", precision=f"fp8-{scaling}") for scaling in SCALINGS),
        own("30B-A3B, bf16", **sparse),
        peer("30B-A3B, transformers", **sparse),
        own("30B-A3B, dense of what a token uses", **sparse | {"model": "30B-A3B-width, dense"}),
        own("bf16, weights cast per use", weights_cast="per_use"),
        own("bf16, documents", documents=True),
        own("bf16, selective", checkpointing="selective"),
        own("bf16, full", checkpointing="full"),
        peer("transformers, full", checkpointing="full"),
        own("1B, bf16", **llama_1b),
        peer("1B, transformers", **llama_1b),
        own("1B, bf16, documents", documents=True, **llama_1b),
        own("1B, bf16, full", checkpointing="full", **llama_1b),
        peer("1B, transformers, full", checkpointing="full", **llama_1b),
        *(peer(f"transformers, torchao {scaling}", precision=f"fp8-{scaling}") for scaling in SCALINGS[:2]),
    ]


def _memory(base: dict[str, Any], small: bool) -> list[Row]:
    """Configs of one process, each with a step's two micro-batches but where a case says one."""
    model = {**base["model"], "num_layers": 2 if small else 4}
    spec = {
        **base, "model": model, "batch": 2 if small else 8, "seq_len": 128 if small else 4096, "steps": 5,
        "mean_document": 600, "bound": 0.03,
    }  # fmt: skip
    plain = {"precision": "bf16", "document_mask": False, "loss_chunk": 64 if small else 4096}
    plain |= {} if small else {"compile": {"enabled": True, "backend": base["backend"]}}
    sparse = {"preset": "qwen3-30b-a3b", "num_layers": 3}
    tiny = {**model, "moe": {"num_experts": 4, "top_k": 2, "ffn_dim": 64, "normalize": True}}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({}, {}),
        "full": ({}, {"activation_checkpointing": "full"}),
        "experts": ({"model": tiny} if small else {"model": sparse, "vocab_size": 151_936}, {}),
    }
    if not small:
        cases |= {
            **{scaling: ({}, {"float8": {"recipe": scaling}}) for scaling in SCALINGS},
            "eager": ({}, {"compile": {}}),
            "selective": ({}, {"activation_checkpointing": "selective"}),
            "full, eager": ({}, {"activation_checkpointing": "full", "compile": {}}),
            "documents": ({}, {"document_mask": True}),
            "moments in BF16": ({}, {"optimizer": {"moments": "bf16", "gradients": "bf16"}}),
            "one micro-batch of 4": ({"batch": 4}, {"micro_batch": 4}),
            "rows of 16k": ({"batch": 2, "seq_len": 16_384}, {}),
            "1B": ({"model": {"preset": "1B"}, "batch": 16}, {}),
            "125M": ({"model": {"preset": "125M"}, "vocab_size": 50_257, "batch": 64}, {}),
            "8 layers, full": ({"model": {**model, "num_layers": 8}}, {"activation_checkpointing": "full"}),
            "state on the host": ({}, {"optimizer": {"state": "host"}}),
            "experts, full": (cases["experts"][0], {"activation_checkpointing": "full"}),
        }  # fmt: skip
    return [Row("memory", name, "parts.memory:peaks", {**spec, **sizes, "changes": plain | changes}, 240)
            for name, (sizes, changes) in cases.items()]  # fmt: skip


def _experts(base: dict[str, Any], small: bool) -> list[Row]:
    spec = {**base, "model": {"preset": "qwen3-30b-a3b", "num_layers": 1}, "tokens": 16_384, "dtype": "bfloat16"}
    if small:
        tiny = {"num_experts": 4, "top_k": 2, "ffn_dim": 64}
        spec |= {"model": {**base["model"], "moe": tiny}, "tokens": 128, "dtype": "float32"}
    return [Row("experts", "a layer", "parts.experts:pieces", spec, 120)]


def _checkpoint(base: dict[str, Any], small: bool) -> list[Row]:
    spec = {"device": base["device"], "gb": 0.02 if small else 20.0, "saves": 1 if small else 2,
            "step_s": 0.02 if small else 0.3, "folder": None}  # fmt: skip
    return [Row("checkpoint", mode, "parts.checkpoint:stall", {**spec, "mode": mode}, 420)
            for mode in (["thread"] if small else ["sync", "thread", "process"])]  # fmt: skip


PARTS = {
    "products": _products, "float8": _float8, "attention": _attention, "loss": _loss, "optimizer": _optimizer,
    "casts": _casts, "syncs": _syncs, "selftest": _selftest, "train": _train, "experts": _experts,
    "memory": _memory,    "suspicions": _suspicions, "checkpoint": _checkpoint,
}  # fmt: skip
