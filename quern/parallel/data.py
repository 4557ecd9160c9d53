"""Data parallelism: every rank has other samples, and gradients are SUMMED over ranks.

A loss is the sum over a rank's targets divided by the number of targets of the whole global batch, so the sum over
ranks and micro-batches is the gradient of the mean, however unevenly targets are spread. A mean over ranks, which is
what DDP and FSDP2 do of themselves, would be right only if every rank had the same number of targets.
"""

import contextlib
import warnings
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from quern.model.transformer import Transformer
from quern.parallel.experts.deal import experts_of
from quern.parallel.planning.weights import STREAM, dealt_along
from quern.parallel.tensors.weights import to_local
from quern.torch_versions import fsdp_groups

__all__ = ["accumulation", "gradients_in", "materialise", "replicate", "shard"]


def shard(
    model: Transformer, mesh: DeviceMesh, *, compute_dtype: torch.dtype, reshard_after_forward: bool | int,
    bf16_gradients: bool = False, scatter_once: bool = False, expert_mesh: DeviceMesh | None = None,
) -> nn.Module:  # fmt: skip
    """FSDP2 over a 1-D mesh, HSDP over a 2-D one (replicate, shard), in place.

    Units are every block, the last norm with the head, and the root, which has the embedding; and with ``expert_mesh``
    the experts of a block, which other ranks have copies of than of the rest. So the head's gathering
    overlaps with the blocks' forward, and the sum of its gradient, the largest of all, with their backward. Both ends
    stay gathered from forward to backward. Tied embeddings are the root's, and so is the norm then.

    Weights are gathered in ``compute_dtype``; gradients are summed in at least float32, or in BF16. A number for
    ``reshard_after_forward`` below the shards needs a ``mesh`` of all ranks: torch makes further groups out of it,
    collectively. ``scatter_once``: see :func:`accumulation`.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.bfloat16 if bf16_gradients else torch.promote_types(compute_dtype, torch.float32),
        cast_forward_inputs=False,  # tokens are integers, and rotary tables keep their precision
    )
    # what experts return with tp, and nothing changes in place
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module \(FSDPExperts\) returned a view")
    along = {}
    for experts in experts_of(model):
        for name, weight in experts.named_parameters():
            over = mesh if expert_mesh is None else expert_mesh
            along[weight] = Shard(dealt_along(tuple(to_local(weight).shape), STREAM[name], over.size(over.ndim - 1)))
        if expert_mesh is not None:
            fully_shard(
                experts, mesh=expert_mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision,
                shard_placement_fn=along.get,
            )  # fmt: skip
    for block in model.blocks.children():
        fully_shard(
            block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=precision,
            shard_placement_fn=along.get,
        )  # fmt: skip
    if model.norm is not None and model.head is not None:
        fully_shard([model.norm, model.head], mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=precision)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else a factor of 1 becomes PREMUL_SUM, which gloo lacks
    model.gathered_between_micro_batches = reshard_after_forward is False  # type: ignore[assignment]
    model.scattered_once = scatter_once  # type: ignore[assignment]
    return model


def replicate(model: nn.Module, group: dist.ProcessGroup) -> DistributedDataParallel:
    """DDP whose buckets are summed, not averaged. Weights must be allocated, and the same on every rank.

    DDP forms its buckets anew after the first backward pass, by the order in which gradients came; and where in a
    bucket an element lies decides in which order three or more ranks are added. That backward pass is one of zeros, so
    that all steps have the same buckets, also the first after a resume.
    """
    wrapped = DistributedDataParallel(
        model, process_group=group, init_sync=False, gradient_as_bucket_view=True, broadcast_buffers=False
    )  # buffers are the same on every rank, and in no forward pass sent
    wrapped.register_comm_hook(group, _sum_bucket)
    wrapped.module = _Zero([parameter for parameter in model.parameters() if parameter.requires_grad])
    wrapped().backward()
    with wrapped.no_sync():
        wrapped()  # here it forms them
    wrapped.module = model
    wrapped.zero_grad(set_to_none=True)
    return wrapped


class _Zero(nn.Module):
    """A loss of zero, whose gradients come last parameter first, about as those of a model do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.parameters_of_model = parameters  # a plain list: they stay the model's

    def forward(self) -> torch.Tensor:
        return torch.stack([0.0 * parameter.sum(dtype=torch.float32) for parameter in self.parameters_of_model]).sum()


# its annotations must be the types themselves (DDP compares them): no postponed evaluation in this file
def _sum_bucket(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.SUM, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


@contextlib.contextmanager
def accumulation(model: nn.Module, last: bool) -> Iterator[None]:
    """Around forward and backward of one micro-batch; ``last`` of the step's. The same for every layout.

    DDP sums over ranks once, with the last micro-batch. FSDP2 reduce-scatters each one, so that only a shard of
    gradients is kept between them, or, where they are to be scattered once, the last alone, and adds up whole ones
    before, in the dtype in which they are reduced. HSDP's sum over replicas waits for the last in either case. Weights
    that are kept gathered from forward to backward are kept until the last backward too.
    """
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if last else model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_is_last_backward(last)
        (model.set_requires_gradient_sync if model.scattered_once else model.set_requires_all_reduce)(last)
        if model.gathered_between_micro_batches:
            model.set_reshard_after_backward(last)
    yield


def gradients_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Gradients are kept and added up in ``dtype``, whatever the weights are in. In place, once weights are allocated.

    Autograd rounds as it accumulates. FSDP2, which sets ``.grad`` itself, casts what it has reduced to the dtype in
    which it found the weights, which it notes before its first forward.
    """
    sharded = isinstance(model, FSDPModule)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = None if sharded else dtype  # None: of any dtype
    if sharded:
        model.register_forward_pre_hook(partial(_reduced_to, dtype))


def _reduced_to(dtype: torch.dtype, model: nn.Module, *_: object) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in fsdp_groups(module):
                group._orig_dtype = dtype
                seen = {own.sharded_param.grad.dtype for own in group.fsdp_params if own.sharded_param.grad is not None}
                if seen - {dtype}:  # another torch goes by another name, and micro-batches would be added up rounded
                    raise RuntimeError(f"FSDP2 keeps gradients in {seen.pop()}, expected {dtype}: not with this torch")


def materialise(model: nn.Module, device: torch.device) -> nn.Module:
    """Allocate a model built on ``meta``, without setting values; a model with values is moved. In place."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model.to_empty(device=device)
    return model.to(device)
