"""Traces made by hand, in microseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

MAIN, AUTOGRAD, COMPUTE, COPIES, NETWORK = (7, 100), (7, 101), (0, 7), (0, 8), (0, 20)
"""Process and thread; device and stream."""


def row(category: str, lane: tuple[int, int], name: str, start: float, stop: float, **args: Any) -> Row:
    return {"ph": "X", "cat": category, "name": name, "pid": lane[0], "tid": lane[1], "ts": start, "dur": stop - start,
            "args": args}  # fmt: skip


def op(name: str, start: float, stop: float, lane: tuple[int, int] = MAIN, **args: Any) -> Row:
    return row("cpu_op", lane, name, start, stop, **args)


def mark(name: str, start: float, stop: float, lane: tuple[int, int] = MAIN) -> Row:
    return row("user_annotation", lane, name, start, stop)


def call(name: str, start: float, stop: float, correlation: int, lane: tuple[int, int] = MAIN) -> Row:
    return row("cuda_runtime", lane, name, start, stop, correlation=correlation)


def kernel(name: str, start: float, stop: float, correlation: int, stream: tuple[int, int] = COMPUTE) -> Row:
    return row("kernel", stream, name, start, stop, correlation=correlation, stream=stream[1], device=0)


def sizes(*dims: list[int], dtype: str = "c10::BFloat16") -> dict[str, Any]:
    return {"Input Dims": list(dims), "Input type": [dtype] * len(dims)}


def write(path: Path, rows: list[Row], rank: int | None = None) -> str:
    document: dict[str, Any] = {"schemaVersion": 1, "traceEvents": rows}
    if rank is not None:
        document["distributedInfo"] = {"rank": rank, "world_size": 2}
    path.write_text(json.dumps(document))
    return str(path)


def on_a_gpu() -> list[Row]:
    """Two steps whose account is known: see :data:`ON_A_GPU`. The host runs ahead of the device.

    ====================  =========================================================================
    stream 7              GEMM 10–40, multiplication 50–70, attention 95–110, norm 110–120 | AdamW 120–150, loss 150–155
    stream 8              cast 30–45, copy to the device 80–85
    stream 20             all-gather 20–60 | reduce-scatter 140–165
    host, when all rest   Python 0–10, 70–80 and 94–95, data 85–90, waits for the device 90–94
    ====================  =========================================================================
    """
    return [
        mark("ProfilerStep#4", 0, 100),
        mark("ProfilerStep#5", 100, 160),
        op("aten::linear", 2, 9),
        op("aten::mm", 3, 8, **sizes([64, 32], [32, 16])),
        call("cudaLaunchKernel", 5, 6, 1),
        kernel("sm90_xmma_gemm_bf16bf16_bf16f32", 10, 40, 1),
        op("c10d::_allgather_base_", 9, 12),
        call("cudaLaunchKernelExC", 10, 11, 2),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 60, 2, NETWORK),
        op("aten::to", 12, 14),
        call("cudaLaunchKernel", 13, 14, 3),
        kernel("void at::native::unrolled_elementwise_kernel<copy>", 30, 45, 3, COPIES),
        op("aten::mul", 14, 17),
        call("cudaLaunchKernel", 15, 16, 4),
        kernel("void at::native::vectorized_elementwise_kernel<mul>", 50, 70, 4),
        row("gpu_memcpy", COPIES, "Memcpy HtoD (Pinned -> Device)", 80, 85, correlation=5),
        mark("quern::data", 82, 90),
        call("cudaStreamSynchronize", 90, 94, 6),
        op("aten::_flash_attention_forward", 94, 96),
        call("cudaLaunchKernel", 94, 95, 7),
        kernel("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", 95, 110, 7),
        call("cudaLaunchKernel", 98, 99, 11),
        kernel("void at::native::vectorized_layer_norm_kernel", 110, 120, 11),
        mark("Optimizer.step#AdamW.step", 102, 108),
        op("aten::_fused_adamw_", 103, 107),
        call("cudaLaunchKernel", 104, 105, 8),
        kernel("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", 120, 150, 8),
        call("cuLaunchKernel", 109, 110, 9),
        kernel("triton_red_fused__log_softmax_nll_loss_forward_0", 150, 155, 9),
        call("cudaLaunchKernelExC", 111, 112, 10),
        kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 140, 165, 10, NETWORK),
        row("gpu_user_annotation", COMPUTE, "ProfilerStep#4", 10, 120),
        {"ph": "s", "cat": "ac2g", "id": 1, "pid": 7, "tid": 100, "ts": 5},
    ]


#: Microseconds. 45–50 is what the all-gather does not hide, 155–165 of the reduce-scatter.
ON_A_GPU = {
    "gemm": 30, "attention": 15, "loss": 5, "optimizer": 30, "elementwise": 5 + 20 + 10, "communication": 5 + 10,
    "data": 5 + 5, "host": 10 + 10 + 1, "idle": 4,
}  # fmt: skip
