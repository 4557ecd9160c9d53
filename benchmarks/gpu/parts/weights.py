"""Weights that are cast once after an update, and gradients that are added as they are formed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parts.common import distance, gpu, seconds_of, shape_of, sized
from quern.model.float8.quantise import Quantised
from quern.model.float8.recipe import Recipe
from quern.model.init import initialise
from quern.model.transformer import Transformer
from quern.parallel.apply import Parallel, parallelize
from quern.parallel.context.inputs import Inputs
from quern.parallel.planning.layout import Layout
from quern.parallel.planning.mesh import MeshPlan, build_mesh


def refresh(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Time of making anew what is kept of all weights, once a step, and the bytes it keeps; ``passes``: it has the bits
    of weights that are cast or quantised alone, uncompiled."""
    parallel = built(spec, "auto")
    (kept,) = parallel.kept
    kept.refresh()
    seconds = seconds_of(kept.update, gpu(spec))
    numbers = sum(weight.numel() for weight, _ in kept.weights)
    same = all(equal(own.factor, own.by.factor(weight.detach().to(torch.bfloat16))) for weight, own in kept.weights)
    return [{"what": spec["scaling"] or "bf16", "numbers": numbers, "bytes a number": kept.bytes / numbers,
             **sized(seconds, moved=4 * numbers + kept.bytes), "passes": same}]  # fmt: skip


def gradients(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """A step of several micro-batches with kept weights and with weights cast per use: the gradients' distance from
    each other in float64 may not be more than what rounding a micro-batch's gradient to BF16 costs, and the time of
    both."""
    found, seconds = {}, {}
    for how in ("per_use", "auto"):
        parallel = built(spec, how)
        run(parallel, spec)
        found[how] = [parameter.grad.clone() for parameter in parallel.model.parameters()]
        seconds[how] = seconds_of(lambda parallel=parallel: run(parallel, spec), gpu(spec))
        del parallel
    far = max(distance(a, b) for a, b in zip(found["auto"], found["per_use"], strict=True))
    return [
        {"what": f"{spec['scaling'] or 'bf16'}, {how}", **sized(seconds[how]), "distance": far, "bound": spec["bound"],
         "passes": far <= spec["bound"]}
        for how in found
    ]  # fmt: skip


def equal(kept: Tensor | Quantised, made: Tensor | Quantised) -> bool:
    """Whether they have the same bits; ``made`` uncompiled."""
    if isinstance(kept, Quantised) and isinstance(made, Quantised):
        data = torch.equal(kept.data_RS.view(torch.uint8), made.data_RS.view(torch.uint8))
        return data and torch.equal(kept.scale, made.scale)
    return torch.equal(kept, made)


def built(spec: dict[str, Any], weights_cast: str) -> Parallel:
    recipe = None if spec["scaling"] is None else Recipe(spec["scaling"])
    layout = Layout(
        torch.bfloat16,
        compile_backend=spec["backend"],
        float8=recipe,
        weights_cast=weights_cast,
        seq_len=spec["length"],
    )  # fmt: skip
    model = Transformer(shape_of(spec), compute_dtype=torch.bfloat16)
    parallel = parallelize(model, build_mesh(MeshPlan(), gpu(spec).type), layout, gpu(spec))
    initialise(parallel.model, seed=0)
    return parallel


def run(parallel: Parallel, spec: dict[str, Any]) -> None:
    """One step's forward and backward, of two micro-batches, and the casts after an update."""
    drawn = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(2):
        tokens_BL = torch.randint(spec["vocab_size"], (1, spec["length"]), generator=drawn).to(gpu(spec))
        batches.append(Inputs(tokens_BL, tokens_BL.roll(-1, 1), None, None))
    parallel.model.zero_grad(set_to_none=True)
    for kept in parallel.kept:  # once a step, as after an update
        kept.update()
    parallel.run.forward_backward(batches, lambda loss: loss / (2 * spec["length"]))
