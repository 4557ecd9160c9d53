"""Where the time went: traces whose answer is known by hand, and any trace against counting on a grid."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.train.profiling.account import Account, account
from quern.train.profiling.classes import CLASSES, collective, kernel_class, operation_class
from quern.train.profiling.losses import _COLLECTIVES
from quern.train.step.trace import read_trace
from support.train import trace_case as case


def accounted(folder: Path, rows: list[case.Row]) -> Account:
    return account(read_trace(case.write(folder / "trace.json", rows)))


def micro(found: Account) -> dict[str, float]:
    return {kind: ns / 1e3 for kind, ns in found.classes.items() if ns}


def test_overlapping_streams_of_a_gpu(tmp_path):
    found = accounted(tmp_path, case.on_a_gpu())
    assert found.steps == (120_000, 45_000)  # a step begins when the device has done what the one before gave it
    assert micro(found) == case.ON_A_GPU
    assert found.device == "cuda"
    assert found.communication_ns == 65_000
    kinds = {each.kind: (each.count, each.total_ns, each.exposed_ns) for each in found.collectives}
    assert kinds == {"all-gather": (1, 40_000, 5_000), "reduce-scatter": (1, 25_000, 10_000)}
    (product,) = found.products
    assert (str(product.shape), product.count, product.ns) == ("64×16×32 bfloat16", 1, 30_000)
    assert product.flops == 2 * 64 * 16 * 32
    assert found.own_ns == 165_000 - 15_000 - 4_000


def test_the_order_of_events_in_a_file_does_not_matter(tmp_path):
    assert accounted(tmp_path, case.on_a_gpu()[::-1]) == accounted(tmp_path, case.on_a_gpu())


def test_a_kernel_without_its_launch_is_judged_by_its_name(tmp_path):
    rows = [row for row in case.on_a_gpu() if row["cat"] not in ("cuda_runtime", "cpu_op")]
    found = micro(accounted(tmp_path, rows))
    rest = ("gemm", "attention", "loss", "optimizer", "elementwise", "communication")
    assert {kind: found[kind] for kind in rest} == {kind: case.ON_A_GPU[kind] for kind in rest}


def test_operations_of_the_host_itself(tmp_path):
    """Python 0–2, a product with what it calls 2–20, Python 20–22; gloo 15–30 is hidden up to 20 and from 25 on."""
    rows = [
        case.mark("ProfilerStep#0", 0, 50),
        case.op("aten::linear", 2, 20),
        case.op("aten::t", 2, 3),
        case.op("aten::mm", 4, 20, **case.sizes([8, 4], [4, 2], dtype="float")),
        case.op("aten::copy_", 5, 7),
        case.mark("gloo:all_gather", 15, 30),  # in no thread's order: it may begin inside an operation and outlast it
        case.op("autograd::engine::evaluate_function: MulBackward0", 24, 32),
        case.op("MulBackward0", 24, 32),
        case.op("aten::mul", 25, 31),
        case.op("_c10d_functional::wait_tensor", 33, 36),
        case.mark("gloo:all_reduce", 34, 36),
        case.mark("quern::data", 36, 40),
        case.mark("quern::update", 41, 49),
        case.op("aten::_foreach_norm", 42, 44),
        case.mark("Optimizer.step#AdamW.step", 45, 48),
        case.op("aten::_fused_adamw_", 45, 48),
        case.op("aten::mul", 0, 50, lane=(7, 555)),  # another thread of the process
    ]
    found = accounted(tmp_path, rows)
    assert micro(found) == {
        "gemm": 16, "elementwise": 6, "optimizer": 5, "communication": 5 + 3, "data": 4,
        "host": 50 - 16 - 6 - 5 - 8 - 4,
    }  # fmt: skip
    kinds = {each.kind: (each.count, each.total_ns, each.exposed_ns) for each in found.collectives}
    assert kinds == {
        "all-gather": (1, 15_000, 5_000),
        "all-reduce": (1, 2_000, 2_000),
        "waiting": (1, 3_000, 1_000),
    }
    (product,) = found.products
    assert (product.ns, product.flops) == (16_000, 128)


def test_steps_leave_out_what_is_between_them(tmp_path):
    rows = [case.mark("ProfilerStep#0", 0, 10), case.mark("ProfilerStep#1", 20, 30)]
    rows += [case.op("aten::mul", start, start + 2) for start in (8, 12, 18, 20)]
    found = accounted(tmp_path, rows)
    assert found.steps == (10_000, 10_000)
    assert micro(found) == {"elementwise": 4, "host": 16}


def test_a_trace_without_steps_is_one(tmp_path):
    found = accounted(tmp_path, [case.op("aten::mul", 5, 10), case.op("aten::view", 10, 12)])
    assert found.steps == (7_000,)
    assert micro(found) == {"elementwise": 5, "host": 2}


KERNELS = {
    "sm90_xmma_gemm": "gemm",
    "pytorch_flash::flash_fwd": "attention",
    "nll_loss": "loss",
    "FusedAdam": "optimizer",
    "vectorized_elementwise": "elementwise",
    "ncclDevKernel_AllReduce": "communication",
}
SPAN = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: (min(pair), max(pair)))


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.sampled_from(sorted(KERNELS)), SPAN, st.integers(1, 4)), min_size=1, max_size=8),
    st.lists(SPAN, max_size=3),
    st.lists(SPAN, max_size=3),
)
def test_any_streams_against_a_grid_of_microseconds(tmp_path_factory, kernels, waits, data):
    rows = [case.mark("ProfilerStep#0", 0, 30)]
    rows += [case.kernel(name, *span, n, (0, stream)) for n, (name, span, stream) in enumerate(kernels)]
    rows += [case.call("cudaEventSynchronize", *span, 100 + n) for n, span in enumerate(waits)]
    rows += [case.mark("quern::data", *span) for span in data]
    expected = dict.fromkeys(CLASSES, 0)
    for instant in range(30):
        running = {KERNELS[name] for name, (start, stop), _ in kernels if start <= instant < stop}
        if running:
            expected[min(running, key=CLASSES.index)] += 1
        elif any(start <= instant < stop for start, stop in data):
            expected["data"] += 1
        else:
            expected["idle" if any(start <= instant < stop for start, stop in waits) else "host"] += 1
    found = accounted(tmp_path_factory.mktemp("trace"), rows)
    assert {kind: ns / 1e3 for kind, ns in found.classes.items()} == expected


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (("aten::mm", "aten::linear"), "gemm"),
        (("aten::copy_", "aten::mm"), "gemm"),
        (("aten::bmm", "aten::scaled_dot_product_attention"), "attention"),
        (("aten::mm", "_ChunkedCrossEntropy"), "gemm"),
        (("aten::exp_", "_ChunkedCrossEntropy"), "loss"),
        (("aten::add_", "quern::update"), "optimizer"),
        (("aten::mul", "aten::rms_norm"), "elementwise"),
        (("aten::view",), "host"),
        (("autograd::engine::evaluate_function: MmBackward0",), "host"),
        (("FSDP::pre_forward (blocks.1)",), "host"),
        (("Torch-Compiled Region: 0/0",), "host"),
        (("## Call CompiledFxGraph fwoik ##", "Torch-Compiled Region: 0/0"), "elementwise"),
        (("triton_poi_fused_mul_0",), "elementwise"),
        # recomputation begins inside the node of autograd that first asks for what was not kept
        (("aten::mul", "autograd::engine::evaluate_function: torch_attn__varlen_attnBackward"), "elementwise"),
        (("c10d::_reduce_scatter_base_", "FSDP::post_backward_reduce"), "communication"),
    ],
)
def test_operations_by_what_they_were_called_from(chain, expected):
    assert operation_class(chain) == expected


@pytest.mark.parametrize(
    ("name", "chain", "expected"),
    [
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", (), "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", (), "gemm"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90>", (), "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention)", (), "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", (), "attention"),
        ("triton_tem_fused_mm_3", (), "gemm"),
        ("triton_tem_fused_flex_attention_0", (), "attention"),
        ("triton_poi_fused_mul_silu_4", (), "elementwise"),
        ("triton_per_fused__fused_rms_norm_2", (), "elementwise"),
        ("Memset (Device)", ("cudaMemsetAsync", "aten::mm"), "gemm"),
        ("void at::native::reduce_kernel", ("cudaLaunchKernel", "aten::_flash_attention_backward"), "attention"),
        ("void at::native::reduce_kernel", ("cudaLaunchKernel", "aten::_foreach_norm", "quern::update"), "optimizer"),
        ("void at::native::reduce_kernel", ("cudaLaunchKernel", "aten::sum", "_ChunkedCrossEntropy"), "loss"),
        ("Memcpy PtoP (Device -> Device)", ("cudaMemcpyAsync", "aten::copy_"), "communication"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", ("aten::mm",), "communication"),
    ],
)
def test_kernels_by_name_and_by_what_launched_them(name, chain, expected):
    assert kernel_class(name, chain) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all-gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce-scatter"),
        ("ncclDevKernel_AllReduce_Sum_bf16_TREE_LL", "all-reduce"),
        ("ncclDevKernel_SendRecv", "send and receive"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("gloo:recv", "send and receive"),
        ("c10d::_allgather_base_", "all-gather"),
        ("c10d::alltoall_base_", "all-to-all"),
        ("Memcpy PtoP (Device -> Device)", "copies between devices"),
        ("_c10d_functional::wait_tensor", "waiting"),
    ],
)
def test_collectives_by_name(name, expected):
    assert collective(name) == expected
    assert expected in _COLLECTIVES


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        (("c10d::alltoall_base_", "_c10d_functional::all_to_all_single"), "all-to-all"),
        (("c10d::send", "quern::context_attention"), "ring of cp"),
        (("c10d::send", "quern::context_attention_backward", "autograd::engine::evaluate_function"), "ring of cp"),
        (("c10d::send",), "send and receive"),
        ((), "send and receive"),
    ],
)
def test_nccls_sends_are_what_called_them(tmp_path, callers, expected):
    """Of an all-to-all and a ring too, in which no stage waits for another."""
    rows = [case.mark("ProfilerStep#0", 0, 50)]
    rows += [case.op(name, 10 - depth, 13 + depth) for depth, name in enumerate(callers, 1)]
    rows += [case.call("cudaLaunchKernelExC", 10, 12, 1), case.kernel("ncclDevKernel_SendRecv", 14, 40, 1)]
    (found,) = accounted(tmp_path, rows).collectives
    assert (found.kind, found.count, found.total_ns) == (expected, 1, 26_000)
    assert expected in _COLLECTIVES


def test_gloos_sends_are_of_the_ring_that_they_begin_in(tmp_path):
    """Its spans outlast the call, and those of a pipeline on another thread begin in the same time."""
    rows = [
        case.mark("ProfilerStep#0", 0, 50),
        case.op("quern::context_attention", 5, 30),
        case.op("c10d::send", 8, 10),
        case.mark("gloo:send", 9, 35),
        case.mark("gloo:recv", 9, 12, lane=case.AUTOGRAD),
        case.mark("gloo:send", 40, 44),
    ]
    kinds = {each.kind: each.total_ns for each in accounted(tmp_path, rows).collectives}
    assert kinds == {"ring of cp": 27_000, "send and receive": 3_000 + 4_000}
