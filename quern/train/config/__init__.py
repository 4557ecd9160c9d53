"""The trainer's config. Imports neither torch nor Ray, since lineage and the command line read it too."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from quern.config import Section
from quern.model.config import ModelConfig
from quern.model.moe.config import MoEShape
from quern.train.config.checkpoint import CheckpointConfig, ResumeConfig
from quern.train.config.experts import ExpertsConfig, OwnUpdateConfig
from quern.train.config.float8 import Float8Config
from quern.train.config.metrics import HeldOutConfig, MetricsConfig, ValidationConfig
from quern.train.config.mixture import DataConfig, DoReMiConfig, PhaseConfig, check_sources, placed
from quern.train.config.numbers import Count, NonNegative
from quern.train.config.parallel import ParallelConfig
from quern.train.config.supervision import GuardConfig, ReplicasConfig, WatchdogConfig

__all__ = [
    "CheckpointConfig", "CommConfig", "CompileConfig", "DataConfig", "DoReMiConfig", "Float8Config", "ForensicsConfig",
    "GuardConfig", "HeldOutConfig", "MetricsConfig", "OptimizerConfig", "ParallelConfig", "PhaseConfig",
    "ProcessConfig", "ProfileConfig", "ReplicasConfig", "ResumeConfig", "ScheduleConfig", "TrainConfig",
    "ValidationConfig", "WatchdogConfig",
]  # fmt: skip

_MOST_BETA = 257 / 258
"""Above it a moment in BF16, rounded to nearest, comes to a stop."""


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019); decay on matrices only."""

    later: ClassVar[Mapping[str, Any]] = {
        "moments": "fp32", "gradients": "fp32", "state": "device",
        "experts": OwnUpdateConfig().model_dump(), "router": OwnUpdateConfig().model_dump(),
    }  # fmt: skip
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay rate of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay, on matrices only."""
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; null = no clipping."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """What the two moments are stored in (fp32 = FP64 with fp64): bf16 is 4 bytes a parameter less, and another recipe.
    Computed in FP32, rounded to nearest, for which ``beta1`` and ``beta2`` must be at most 0.996."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """What gradients are summed and kept in between backward and update (fp32 = FP64 with precision fp64): bf16 is 2
    bytes a parameter less and half of what FSDP2 reduces, and another recipe: micro-batches and ranks are summed in
    BF16. With precision bf16, without DDP and pipelines."""
    state: Literal["device", "host"] = "device"
    """Where masters and moments are: host = in the host's memory, updated by its processor, while the device holds
    weights in ``precision``, gradients and activations (ZeRO-Offload). The update overlaps with the next forward, block
    by block. The same arithmetic; on a GPU by another kernel."""
    experts: OwnUpdateConfig = OwnUpdateConfig()
    """Of the weights of routed experts; shared experts are updated as the rest is."""
    router: OwnUpdateConfig = OwnUpdateConfig()
    """Of the weights of routers."""

    @model_validator(mode="after")
    def _moves(self) -> Self:
        # v falls by (1 - beta) v, and must by half a step of BF16 or more: 2^-8 of the power of two below v, at worst
        # for v one step above that, as 1 + 2^-7, whose half step is 1/258 of it (and there ties go to the power)
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if self.moments == "bf16" and beta > _MOST_BETA:
                raise ValueError(
                    f"{name}: a moment in BF16 stops moving where 1 - {name} is below 1/258, as each step rounds to "
                    f"what it was; expected at most 257/258 = 0.9961 with moments bf16, or moments fp32, got {beta}"
                )
        return self

    def check(self, moe: MoEShape | None) -> str | None:
        """Why these settings do not fit a model with such experts; None if they do."""
        for name, own in (("experts", self.experts), ("router", self.router)):
            for key, field in OwnUpdateConfig.model_fields.items():
                if moe is None and getattr(own, key) != field.default:
                    return f"optimizer.{name}.{key}: expected model.moe with it: the model has no experts"
        return None


class ScheduleConfig(Section):
    """Learning rate by model step: linear warm-up, then ``kind``, down to ``final · lr`` at ``steps``."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up."""
    warmup: NonNegative = 2000
    """[steps] Linear warm-up; at most ``steps``."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """[share] Learning rate at the end, in the step after the last, as a share of ``lr``."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """[share] ``wsd``: share of all steps that decay linearly at the end."""


class CompileConfig(Section):
    """``torch.compile``, block by block, and of the loss."""

    enabled: bool = False
    """Compile each block, and what the loss computes between its products."""
    backend: str = "inductor"
    """Backend of ``torch.compile``."""


class CommConfig(Section):
    """How long ranks wait for each other. What waits longer has lost a rank: the run fails, and says which."""

    first_timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """[seconds] Longest wait of a collective until the first step is done: ranks load, compile and connect each at its
    own pace."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """[seconds] Longest wait of a collective after the first step."""


class ProcessConfig(Section):
    """What a rank asks of its process and its machine."""

    bind_cores: bool = True
    """CUDA: run on the cores of the GPU's NUMA node, unless the launcher has restricted the process already."""
    gc_interval: NonNegative = 50
    """[steps] Steps between two collections of Python's garbage, in the same steps on every rank; 0 = when Python
    likes."""


class ForensicsConfig(Section):
    """What is recorded of a step that is a spike or not finite: ``RUN/forensics/``."""

    window: NonNegative = 8
    """[steps] Steps whose losses by sequence and gradient norms by layer are kept in memory for it, the step itself
    included; 0 = off."""
    steps: tuple[NonNegative, ...] = ()
    """[steps] Steps that are recorded in any case. Example: [1000]"""
    max_files: Count = 100
    """[files] Most steps that a run records."""

    @model_validator(mode="after")
    def _on(self) -> Self:
        if self.steps and not self.window:
            raise ValueError("steps: expected a window of 1 or more with it")
        return self


class ProfileConfig(Section):
    """A ``torch.profiler`` trace of chosen steps, and a snapshot of memory when it runs out."""

    first_step: NonNegative | None = None
    """[steps] First traced step; null = no trace. Example: 100"""
    steps: Count = 3
    """[steps] Steps that are traced."""
    memory_snapshot: bool = False
    """CUDA: record allocations, and write a snapshot when memory runs out."""


class TrainConfig(Section):
    """A training run."""

    later: ClassVar[Mapping[str, Any]] = {
        "comm": CommConfig().model_dump(), "process": ProcessConfig().model_dump(), "weights_cast": "auto",
        "activation_checkpointing_layers": None, "activation_memory_budget": None, "flash_attention": "default",
        "on_event": None, "preflight": False, "preflight_timeout_s": 120.0, "watchdog": WatchdogConfig().model_dump(),
        "out_of_memory": "fail", "replicas": ReplicasConfig().model_dump(), "device_check_s": 30.0,
        "experts": ExpertsConfig().model_dump(), "doremi": DoReMiConfig().model_dump(),
    }  # fmt: skip
    run_dir: str
    """The folder of the run, on a file system that all nodes share. Example: runs/train"""
    data: Annotated[tuple[DataConfig, ...], Field(min_length=1)]
    """The sources of the mixture. Example: [{path: runs/first/tokens/web}]"""
    document_mask: bool = True
    """Attention stays inside a document; positions restart with it; its first token is no target."""
    phases: tuple[PhaseConfig, ...] = ()
    """Changes of weights or batch size at given data steps. Example: [{first_step: 20000, global_batch: 1024}]"""
    doremi: DoReMiConfig = DoReMiConfig()
    model: ModelConfig = ModelConfig(preset="debug")
    seq_len: Count = 2048
    """[tokens] Length of a sequence."""
    global_batch: Count = 512
    """[sequences] Sequences per step."""
    micro_batch: Count = 1
    """[sequences] Sequences per forward pass and data-parallel rank."""
    steps: Count
    """[steps] Optimizer steps of the run. Example: 100000"""
    seed: NonNegative = 0
    """Seed of the weights and of the order."""
    init_from: str | None = None
    """A checkpoint whose weights a new run begins with (from ``quern checkpoint import-hf``, for example), or a
    training run: its newest. Keys of ``model`` that are not given are the checkpoint's. Example: checkpoints/llama"""
    precision: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    """Precision of compute. Master weights, moments and reductions are FP32 (FP64 with fp64); ``optimizer`` may say
    BF16 for moments and gradients."""
    weights_cast: Literal["auto", "per_use"] = "auto"
    """When weights are cast to bf16 or fp16, and then quantised for FP8. ``auto``: once after each update, and kept (2
    bytes a weight), where neither ``dp_shard`` nor ``tp`` splits them; in one process their gradients are then added
    up as they are formed. ``per_use``: wherever they are used, which takes less memory. FSDP2 casts what it gathers in
    either case."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is CUDA where there is one."""
    attention: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    """Attention implementation; ``auto`` takes varlen for document masks on CUDA in BF16 and FP16, else sdpa."""
    flash_attention: Literal["default", "fa3", "fa4"] = "default"
    """CUDA, BF16 and FP16: whose flash kernels varlen and, without document masks, sdpa run. ``default`` is torch's
    choice among its own and cuDNN's; FlashAttention 3 and 4 are packages of their own, and cuDNN's are then off."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Which activations are recomputed in backward: none, those of whole blocks, or all but the costly products of a
    block."""
    activation_checkpointing_layers: Count | None = None
    """[layers] With ``activation_checkpointing``: the first so many blocks of each stage recompute, the others keep
    everything; null = all recompute. Example: 16"""
    activation_memory_budget: Annotated[float, Field(ge=0, lt=1)] | None = None
    """[share] With ``compile`` and in place of ``activation_checkpointing``: how much a compiled block may keep for
    backward, of what it would keep by itself; torch's partitioner recomputes what is cheapest. Null = all. Example:
    0.5"""
    out_of_memory: Literal["fail", "full_checkpointing", "halve_micro_batch"] = "fail"
    """What the next start of a run does that ran out of a GPU's memory, at once with one process or ``--max-restarts``:
    the same, or go on with ``activation_checkpointing: full``, or with half of ``micro_batch``. Samples and sums stay
    the same, but for rounding."""
    device_check_s: Annotated[float, Field(ge=0)] = 30.0
    """[seconds] CUDA with nvidia-ml-py: how often each rank reads its GPU's state beside the run; a GPU that fails ends
    the run after a save, with exit code 6. 0 = never."""
    loss_chunk: Count = 4096
    """[tokens] Tokens whose logits exist at one time."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of log²Z in what is minimised (PaLM: 1e-4); ``loss`` in the metrics is the cross-entropy alone."""
    deterministic: bool = False
    """``torch.use_deterministic_algorithms``: same layout, same bits on CUDA too."""
    compile: CompileConfig = CompileConfig()
    float8: Float8Config = Float8Config()
    experts: ExpertsConfig = ExpertsConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    comm: CommConfig = CommConfig()
    process: ProcessConfig = ProcessConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    guard: GuardConfig = GuardConfig()
    forensics: ForensicsConfig = ForensicsConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    data_skip: NonNegative = 0
    """[steps] With ``resume.step``: data steps that are never read, from the checkpoint's on."""
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()
    on_event: str | None = None
    """Command that ``quern train --nproc`` starts, without a shell, when the run fails or stops; the event is a line of
    JSON on its standard input. Example: ./page-somebody --team training"""
    verify_shards: bool = True
    """Compare every shard's SHA-256 at the start, each rank its share; files verified before are not read again."""
    preflight: bool = False
    """Check the machines first, as ``quern doctor`` does, and start only if nothing is found."""
    preflight_timeout_s: Annotated[float, Field(ge=1)] = 120.0
    """[seconds] With ``preflight``: how long others wait for a node that does not answer."""

    @field_validator("on_event")
    @classmethod
    def _is_a_command(cls, value: str | None) -> str | None:
        with suppress(ValueError):  # of a quotation mark that is not closed
            if value is None or shlex.split(value):
                return value
        raise ValueError(f"expected a command with its arguments, quoted as for a shell, got {value!r}")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_sources(self.data)
        object.__setattr__(self, "phases", tuple(placed(self.phases, self.global_batch, self.seq_len, len(self.data))))
        if self.doremi.reference is None and self.doremi != DoReMiConfig():
            raise ValueError("doremi: expected a reference with these settings")
        if self.doremi.reference is not None and (len(self.data) < 2 or not all(own.weight > 0 for own in self.data)):
            raise ValueError("doremi: expected two sources or more, and of each a weight above 0: all are read")
        if self.forensics.steps and max(self.forensics.steps) >= self.steps:
            most = max(self.forensics.steps)
            raise ValueError(f"forensics.steps: expected steps below {self.steps} (steps), got {most}")
        if self.activation_checkpointing_layers is not None and self.activation_checkpointing == "none":
            raise ValueError("activation_checkpointing_layers: expected full or selective activation_checkpointing too")
        if self.activation_memory_budget is not None and not self.compile.enabled:
            raise ValueError("activation_memory_budget: expected only together with compile.enabled")
        if self.activation_memory_budget is not None and self.compile.backend in ("eager", "aot_eager"):
            raise ValueError(
                f"activation_memory_budget: compile.backend {self.compile.backend} has no partitioner that goes by it; "
                "expected inductor"
            )
        if self.activation_memory_budget is not None and self.activation_checkpointing != "none":
            raise ValueError(
                "activation_memory_budget: expected activation_checkpointing none with it, got "
                f"{self.activation_checkpointing}: both say what is recomputed"
            )
        if self.precision == "fp16" and self.guard.non_finite != "skip":
            raise ValueError(
                "guard.non_finite: expected skip with precision fp16, whose loss scale grows until gradients overflow, "
                f"got {self.guard.non_finite}"
            )
        if self.precision == "fp16" and self.float8.recipe is not None:
            raise ValueError(f"float8.recipe: expected null with precision fp16, or bf16, got {self.float8.recipe}")
        if self.precision == "fp64" and self.optimizer.moments == "bf16":
            raise ValueError("optimizer.moments: bf16 is computed in FP32; expected fp32 with precision fp64")
        if self.precision != "bf16" and self.optimizer.gradients == "bf16":
            raise ValueError(
                f"optimizer.gradients: bf16 is of precision bf16; expected fp32 with precision {self.precision}"
            )
        if self.precision == "fp64" and self.float8.implementation == "torchao":
            raise ValueError("float8.implementation: torchao sums in float32; expected quern with precision fp64")
        if self.resume.from_store and self.checkpoint.store is None:
            raise ValueError("resume.from_store: expected only together with checkpoint.store")
        for name, value in (("data_skip", self.data_skip), ("resume.again", self.resume.again)):
            if value and self.resume.step is None:
                raise ValueError(f"{name}: expected only together with resume.step")
        return self
