"""Measures what a rank of a run holds in a step: every tensor that operators give and that is alive."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quern.model.float8.quantise import Quantised
from quern.torch_versions import fsdp_groups
from quern.train.config import TrainConfig
from quern.train.processes.ranks import open_ranks
from quern.train.setup import open_trainer
from quern.train.trainer import Trainer

__all__ = ["Measured", "measure"]


@dataclass(frozen=True)
class Measured:
    """Bytes of one rank in one step, the third of a run."""

    weights: int
    moments: int
    gradients: int
    activations: int
    """The most, after any block's forward or when a loss is there: all that the step has made but for gradients,
    gathered and cast weights."""
    peak: int
    """The most of all, after any operator."""


class Alive(TorchDispatchMode):
    """All memory that operators give while it is entered, and the most of it at a time, with what was ``there``."""

    def __init__(self, there: dict[int, int]) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._there = there
        self.peak = self._before = self._bound = sum(there.values())
        self._operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta:
                storage = value.untyped_storage()
                if storage._cdata not in self._there:
                    self._storages[storage._cdata] = weakref.ref(storage)
                    self._bound += storage.nbytes()
        self._operators += 1
        if self._bound > self.peak or self._operators % 32 == 0:  # FSDP2 gives memory to storages that are there
            self._bound = self._before + sum(self.bytes().values())
            self.peak = max(self.peak, self._bound)
        return out

    def bytes(self) -> dict[int, int]:
        found = {}
        for key, reference in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[key]
            else:
                found[key] = storage.nbytes()
        return found


def measure(config: TrainConfig) -> Measured:
    """Collective."""
    with open_ranks("cpu") as ranks, open_trainer(config, ranks) as trainer:
        trainer.start_loop()
        for step in range(2):
            trainer.train_step(step)
        return _look(trainer)


def _look(trainer: Trainer) -> Measured:
    parallel, most = trainer.parallel, 0
    models = [part.module for part in getattr(parallel.run, "_parts", ())] or [parallel.model]
    parameters = [p for p in parallel.model.parameters() if p.requires_grad]
    trainer.optimizer.zero_grad(set_to_none=True)
    moments = [
        value for slots in trainer.optimizer.state.values() for name, value in slots.items() if name.startswith("exp_")
    ]
    state = [*parameters, *moments, *(p.grad for p in parameters)]
    with Alive(_storages(state)) as alive:

        def sample(*_: Any) -> None:
            nonlocal most
            held = alive.bytes()
            schedule = getattr(parallel.run, "_schedule", None)
            buffers = _received(() if schedule is None else schedule[2])
            for key in _storages(_not_activations(models, parameters, parallel.kept) + buffers):
                held.pop(key, None)
            most = max(most, sum(held.values()))

        hooks = [block.register_forward_hook(sample) for block in parallel.model.blocks.children()]
        within = trainer.parallel.run.forward_backward

        def run(inputs: Any, weigh: Any, losses: Any = None) -> Tensor:
            def weighed(loss_sum: Tensor) -> Tensor:
                sample()
                return weigh(loss_sum)

            return within(inputs, weighed, losses)

        trainer.parallel.run.forward_backward = run  # type: ignore[method-assign]
        gradients = 0

        def look(*_: Any) -> None:
            nonlocal gradients
            gradients = sum(_own(p.grad).nbytes for p in parameters if p.grad is not None)

        trainer.on_gradients = look
        trainer.train_step(2)
        for hook in hooks:
            hook.remove()
    weights = sum(_own(parameter).nbytes for parameter in parameters)
    return Measured(weights, sum(_own(m).nbytes for m in moments), gradients, most, alive.peak)


def _not_activations(models: list[nn.Module], parameters: list[nn.Parameter], kept: Any) -> list[Tensor | None]:
    modules = [module for model in models for module in model.modules()]
    groups = {id(g): g for module in modules if isinstance(module, FSDPModule) for g in fsdp_groups(module)}
    owned = [own for group in groups.values() for own in group.fsdp_params]
    found: list[Any] = [p.grad for p in parameters]
    for own in owned:
        whole = getattr(own, "_unsharded_param", None)
        found += [own.sharded_param.grad, own.unsharded_accumulated_grad, *own.all_gather_outputs, whole]
        found += [None if whole is None else whole.grad, getattr(own, "_sharded_post_forward_param_data", None)]
    for group in groups.values():
        travelling = [group._all_gather_result]
        if (state := group.comm_ctx.all_gather_state) is not None:
            travelling.append(state.all_gather_result)
        found += [one.all_gather_output for one in travelling if one is not None] + [group._partial_reduce_output]
        found += [state.reduce_scatter_input for state in group.comm_ctx.reduce_scatter_states]
    for part in kept:
        for _, own in part.weights:
            factors = (own.factor, own.turned)
            found += [t for f in factors for t in ((f.data_RS, f.scale) if isinstance(f, Quantised) else (f,))]
            found.append(own.total_OK)
    return found


def _received(stages: Any) -> list[Any]:
    """Where the stages of a pipeline receive."""
    told = [one for stage in stages for kind in (stage.args_recv_info, stage.grad_recv_info) for one in kind.values()]
    return [getattr(info, "buffer", None) for infos in told for info in infos]


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _storages(tensors: list[Any]) -> dict[int, int]:
    parts = [_own(tensor) for tensor in tensors if tensor is not None]
    return {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
