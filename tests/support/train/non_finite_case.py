"""A run in which a module gives what is not finite for sequences with a certain token, and what must be said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quern.parallel.context.inputs import Shared
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from support.train import run_case

TOKEN = 17


class _Spoiled(torch.autograd.Function):
    """Gives what it takes; of the gradient, infinity where ``where`` says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(where)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (where,) = ctx.saved_tensors
        return gradients[0].masked_fill(where[..., None], float("inf")), None


def spoil(model: nn.Module, name: str, phase: str, token: int) -> None:
    """Of ``name``, NaN at every place of the token in forward, or infinity in backward."""
    module, tokens = model.get_submodule(name), list[torch.Tensor]()
    given = module.forward

    def forward(x: torch.Tensor, *rest: Any) -> Any:
        where = tokens[-1] == token
        if x.shape[1] != where.shape[1]:  # the sequence is split over ranks of tp
            where = where.chunk(2, 1)[torch.distributed.get_rank()]
        if phase == "weight gradient":
            weight: Any = module.weight
            return nn.functional.linear(x, _Spoiled.apply(weight, where.any().expand(len(weight))))
        if phase == "forward":
            return given(x, *rest).masked_fill(where[..., None], float("nan"))
        return given(_Spoiled.apply(x, where), *rest)

    module.forward = forward  # type: ignore[method-assign]
    root = model.forward

    def noted(tokens_BL: torch.Tensor, *rest: Any, **named: Any) -> Any:
        tokens.append(tokens_BL)
        return root(tokens_BL, *rest, **named)

    model.forward = noted  # type: ignore[method-assign]


def train(
    run: str, paths: list[str], changes: dict[str, Any], name: str | None, phase: str, token: int = TOKEN
) -> dict[str, Any]:
    """A life on this rank: its end state, by step what its rows held: where the token is first, or None; and by step
    and place the tokens and numbers of their documents."""
    read: dict[int, list[tuple[int, int, int, int | None]]] = {}
    held: dict[int, dict[int, Any]] = {}
    config = run_case.settings(
        run, paths,
        **({"guard": {"loss_z": 1e9, "grad_norm_z": 1e9}, "micro_batch": 2, "steps": 6, "model": {"num_layers": 2}}
           | changes),
    )  # fmt: skip
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        take = trainer.feed.take

        def taken(data_step: int) -> Any:
            batch = take(data_step)
            for number, (inputs, origin) in enumerate(zip(batch.micro_batches, batch.origins, strict=True)):
                documents, positions_BR = inputs.documents, None
                if isinstance(documents, Shared):  # of a rank's own tokens
                    documents, positions_BR = documents.whole, documents.positions_BR.tolist()
                ids = documents.ids_BL.tolist() if documents is not None else None
                for row, tokens in enumerate(inputs.tokens_BL.tolist()):
                    at = tokens.index(token) if token in tokens else None
                    if at is not None and positions_BR is not None:
                        at = positions_BR[row][at]
                    held.setdefault(data_step, {})[int(origin.places[row])] = tokens, ids and ids[row]
                    read.setdefault(data_step, []).append((number, row, int(origin.places[row]), at))
            return batch

        trainer.feed.take = taken  # type: ignore[method-assign]
        if phase == "weights":
            trainer.on_gradients = lambda own, step: _break_weight(own.model, name) if step == 2 else None
        elif phase == "gradients":
            trainer.on_gradients = lambda own, step: _break_gradients(own.model) if step == 2 else None
        elif name is not None:
            spoil(trainer.model, name, phase, token)
        drawn = torch.get_rng_state()
        trainer.fit()
        assert torch.equal(drawn, torch.get_rng_state())
        return {"state": run_case.state_of(trainer), "read": read, "held": held}


def _break_weight(model: nn.Module, name: str | None) -> None:
    """Where this rank has it."""
    for own, parameter in model.named_parameters():
        if own == name:
            parameter.detach().view(-1)[3] = float("nan")


def _break_gradients(model: nn.Module) -> None:
    """As a fault that does not come back."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.fill_(float("nan"))


def records(run: Path) -> dict[int, dict[str, Any]]:
    return {
        file["step"]: file for file in (json.loads(p.read_text()) for p in sorted((run / "forensics").glob("*.json")))
    }


def truth(read: list[dict[int, list[tuple[int, int, int, int | None]]]], step: int) -> dict[str, Any]:
    """Of a step, by what each rank read: the first micro-batch with the token, on the lowest rank."""
    number, rank = min((row[0], rank) for rank, own in enumerate(read) for row in own[step] if row[3] is not None)
    held = [
        {"row": row, "place": place, "position": at}
        for micro_batch, row, place, at in read[rank][step]
        if micro_batch == number and at is not None
    ]
    return {"rank": rank, "micro_batch": number, "sequences": held}


def check(record: dict[str, Any], read: list[Any], phase: str, module: str) -> None:
    first, expected = record["first_non_finite"], truth(read, record["step"])
    if phase == "weight gradient":  # is not by token
        expected["sequences"] = []
    assert (first["phase"], first["module"]) == ("forward" if phase == "forward" else "backward", module)
    assert first["redone"]
    assert first["value"] == ("nan" if phase == "forward" else "inf")
    assert {name: first[name] for name in expected} == expected
