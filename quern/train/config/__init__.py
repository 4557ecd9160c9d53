"""The trainer's config. Imports neither torch nor Ray, since lineage and the command line read it too."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from quern.config import Section
from quern.model.config import ModelConfig
from quern.parallel.planning.schedules import Schedule
from quern.train.config.float8 import Float8Config

__all__ = [
    "CheckpointConfig", "CompileConfig", "DataConfig", "Float8Config", "ForensicsConfig", "GuardConfig",
    "MetricsConfig", "OptimizerConfig", "ParallelConfig", "PhaseConfig", "ProfileConfig", "ResumeConfig",
    "ScheduleConfig", "TrainConfig", "ValidationConfig",
]  # fmt: skip

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]


class DataConfig(Section):
    """One source of the mixture."""

    path: str
    """``RUN/tokens/<source>`` of a data run."""
    weight: Weight = 1.0
    """Share of tokens, relative to the other weights."""
    max_epochs: Annotated[float, Field(gt=0)] = 4.0
    """A plan that would read the source more often is refused (Muennighoff et al. 2023: 4 epochs cost little)."""
    accept_version: Count | None = None
    """The corpus version a resumed run may go on with when it is not the one it began on; opens a phase."""


class PhaseConfig(Section):
    """A change of recipe or batch size at a data step."""

    first_step: Count
    """Data step from which it holds (data steps and model steps differ only by skipped data)."""
    weights: tuple[Weight, ...] | None = None
    """One for each entry of ``data``; null = unchanged."""
    global_batch: Count | None = None
    """Null = unchanged."""


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019); decay on matrices only."""

    lr: Annotated[float, Field(gt=0)] = 3e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest global gradient norm; null = no clipping."""


class ScheduleConfig(Section):
    """Learning rate by model step: linear warm-up, then ``kind``, down to ``final · lr`` at ``steps``."""

    kind: Literal["cosine", "wsd", "linear", "constant"] = "cosine"
    warmup: NonNegative = 2000
    """Steps; at most ``steps``."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of ``lr`` at the end, in the step after the last."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.1
    """``wsd``: share of all steps that decay linearly at the end."""


class ParallelConfig(Section):
    """Mesh sizes and how they are used. ``dp_shard`` > 1 is FSDP2, ``dp_replicate`` > 1 DDP, both HSDP."""

    dp_replicate: Count = 1
    dp_shard: Count | None = None
    """Null = all remaining ranks."""
    reshard_after_forward: bool | Count | None = None
    """FSDP2: true = gather again in backward (ZeRO-3), false = keep (ZeRO-2), a number = reshard to that many ranks
    (without tp and pp). Null = true, and false in a pipeline, which would gather for every micro-batch."""
    tp: Count = 1
    """Tensor parallelism: heads, feed-forward width and vocabulary are split over this many ranks, and between them
    the sequence (Megatron's sequence parallelism)."""
    async_tp: bool = False
    """CUDA with ``compile``: gathers and scatters of ``tp`` overlap with the products that need them."""
    nvlink_domain: Count | None = None
    """GPUs that NVLink joins; null = those of a node, as the launcher says."""
    tp_across_domains: bool = False
    """Let ``tp`` reach beyond an NVLink domain."""
    pp: Count = 1
    """Pipeline parallelism: layers are split over this many ranks."""
    schedule: Schedule | None = None
    """In which order a pipeline's rank works on micro-batches; null = 1f1b."""
    stages_per_rank: Count | None = None
    """Of interleaved_1f1b, looped_bfs and interleaved_zero_bubble, 2 or more; null = 2. The others fix it: 2 of the
    V-shaped ones (zbv_zero_bubble, dualpipe_v), else 1."""
    stage_layers: tuple[Count, ...] | None = None
    """Layers of every stage in turn; null = by cost, embedding and head counted."""
    cp: Count = 1
    ep: Count = 1
    zero: Literal[1, 2, 3] | None = None

    @model_validator(mode="after")
    def _available(self) -> Self:
        for axis in ("cp", "ep"):
            if getattr(self, axis) > 1:
                raise ValueError(f"{axis}: not available yet; expected 1, got {getattr(self, axis)}")
        if self.zero is not None:
            raise ValueError("zero: not available; dp_shard with reshard_after_forward says the same")
        return self

    @property
    def resharding(self) -> bool | int:
        """``reshard_after_forward`` with null resolved."""
        return self.pp == 1 if self.reshard_after_forward is None else self.reshard_after_forward


class CompileConfig(Section):
    """``torch.compile``, block by block."""

    enabled: bool = False
    backend: str = "inductor"


class GuardConfig(Section):
    """The reaction to a step whose loss or gradient norm is abnormal. Decided on device."""

    non_finite: Literal["continue", "skip"] = "skip"
    spike: Literal["continue", "skip"] = "continue"
    """Spikes are reported in either case."""
    window: Annotated[int, Field(ge=8)] = 128
    """Healthy steps of history."""
    min_history: Annotated[int, Field(ge=4)] = 32
    """No spike is called before this many."""
    loss_z: Annotated[float, Field(gt=0)] = 6.0
    """Robust z-score (median, MAD) above which a loss is a spike."""
    grad_norm_z: Annotated[float, Field(gt=0)] = 10.0
    max_skips: Count = 100
    """The run fails after this many skipped steps in a row: what is skipped does not enter the history, so a lasting
    change would be skipped for ever."""
    health_window: Count = 100
    """Steps after a checkpoint that have to be finite, applied and no spike before it is *good*."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.min_history > self.window:
            raise ValueError(f"min_history: expected at most window ({self.window}), got {self.min_history}")
        return self


class ForensicsConfig(Section):
    """What is recorded of a step that is a spike or not finite: ``RUN/forensics/``."""

    window: NonNegative = 8
    """Steps whose losses by sequence and gradient norms by layer are kept for it, the step itself included; 0 = off."""
    steps: tuple[NonNegative, ...] = ()
    """Steps of which it is written in any case."""
    max_files: Count = 100
    """Of a run."""

    @model_validator(mode="after")
    def _on(self) -> Self:
        if self.steps and not self.window:
            raise ValueError("steps: expected a window of 1 or more with it")
        return self


class CheckpointConfig(Section):
    """When checkpoints are saved and which are kept."""

    interval: NonNegative | Literal["auto"] = 1000
    """Steps between saves; the last step is always saved; 0 = only the last; auto = what wastes least, by what saves
    cost and how often the run fails."""
    mtbf_hours: Annotated[float, Field(gt=0)] | None = None
    """Mean time between failures of the whole run, for auto; null = by what the ledger has seen, and Llama 3's."""
    max_interval_s: Annotated[float, Field(gt=0)] = 3600.0
    """The longest that auto chooses."""
    keep_last: Count = 3
    """Newest checkpoints that stay, of the branch the run is on; more stay where they are needed."""
    keep_every: Count | None = None
    """Steps whose multiples are kept for ever."""
    verify: bool = True
    """Compare every file's SHA-256 before a resume."""
    mode: Literal["sync", "thread", "process"] = "thread"
    """Who writes: the training loop itself, while it stands still; a thread of each rank; a process beside each rank.
    The last two write from a copy in memory, as large as what a rank saves."""
    overlap: bool = True
    """Copy beside the next forward and backward instead of before them; not with sync."""
    max_failures: Count = 3
    """The run fails when so many saves in a row have failed, or its last one."""
    local: str | None = None
    """A folder on each node's own disk for the tensor files, absolute; ``{node}`` is the node's number. Null = they lie
    in run_dir, which all nodes share. The small files always do."""
    partner: bool | None = None
    """Mirror a node's files to the disk of the next node; null = where there is local."""
    store: str | None = None
    """Where checkpoints are uploaded behind the training, as s3://bucket/run; any URL that fsspec knows. A store
    belongs to one run."""
    store_every: Count | None = None
    """Upload those whose step is a multiple of this, and the last, and keep each until it is there; null = each that
    comes when no other upload is under way, and the last."""
    store_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    """Of each node's upload at most; null = no limit."""
    upload_wait_s: Annotated[float, Field(ge=0)] = 600.0
    """How long a run that ends waits for its uploads, at most 10 s after a signal; the next start takes up the one it
    goes on from."""

    @field_validator("interval", mode="before")
    @classmethod
    def _interval(cls, value: Any) -> Any:
        if value == "auto" or (type(value) is int and value >= 0):
            return value
        raise ValueError(f"expected an integer ≥ 0 or auto, got {value!r}")

    @field_validator("store")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and "://" not in value:
            raise ValueError(f"expected a URL, as s3://bucket/run or file:///folder, got {value!r}")
        return value

    @field_validator("local")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and not os.path.isabs(value):
            raise ValueError(f"expected an absolute path on each node's own disk, got {value!r}")
        if value is not None and set(re.findall(r"{[^}]*}?|}", value)) - {"{node}"}:
            raise ValueError(f"expected {{node}} and no other braces, got {value!r}")
        return value

    @model_validator(mode="after")
    def _belong_together(self) -> Self:
        if self.local is not None and self.keep_last < 2:
            raise ValueError("keep_last: expected at least 2 with local: the newest may not be mirrored yet")
        if self.partner and self.local is None:
            raise ValueError("partner: expected with local only; without it all nodes share the files")
        for name in ("store_every", "store_bytes_per_s"):
            if self.store is None and getattr(self, name) is not None:
                raise ValueError(f"{name}: expected with store only")
        return self


class ResumeConfig(Section):
    """The checkpoint to resume from."""

    step: NonNegative | Literal["good"] | None = None
    """Null = the newest valid checkpoint. A number rolls back to that checkpoint and says so in the ledger; good does
    the same with the last good checkpoint (``guard.health_window``)."""
    again: Count | None = None
    """With a number in ``step``: the same request is carried out once, and given again it goes on behind that; another
    number here asks anew, as after a purge of the corpus."""
    from_store: bool = False
    """A run_dir without a checkpoint goes on from those in checkpoint.store, instead of refusing to mix with them."""

    @field_validator("step", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value is None or value == "good" or (type(value) is int and value >= 0):
            return value
        raise ValueError(f"expected an integer ≥ 0, good or null, got {value!r}")


class ValidationConfig(Section):
    """Loss on the held-out documents (``path + '.val'``)."""

    interval: NonNegative = 500
    """Steps; 0 = only at the end."""
    windows: Count | None = 256
    """Of each source, from its start; null = all."""


class MetricsConfig(Section):
    """The metrics written for each step."""

    tensorboard: bool = True
    live: bool = True
    """A line on stderr with loss, speed and time to go."""
    peak_tflops: Annotated[float, Field(gt=0)] | None = None
    """Dense peak of one device in the compute precision; null = by the device's name, else MFU is null."""


class ProfileConfig(Section):
    """A ``torch.profiler`` trace of chosen steps, and a snapshot of memory when it runs out."""

    first_step: NonNegative | None = None
    """Null = no trace."""
    steps: Count = 3
    memory_snapshot: bool = False
    """CUDA: record allocations, and write a snapshot when memory runs out."""


class TrainConfig(Section):
    """A training run."""

    run_dir: str
    data: Annotated[tuple[DataConfig, ...], Field(min_length=1)]
    document_mask: bool = True
    """Attention stays inside a document; positions restart with it; its first token is no target."""
    phases: tuple[PhaseConfig, ...] = ()
    model: ModelConfig = ModelConfig(preset="debug")
    seq_len: Count = 2048
    global_batch: Count = 512
    """Sequences a step."""
    micro_batch: Count = 1
    """Sequences a forward pass and a data-parallel rank."""
    steps: Count
    seed: NonNegative = 0
    init_from: str | None = None
    """A checkpoint whose weights a fresh run begins with (one of ``quern checkpoint import-hf``, for example), or a
    training run: its newest. Keys of ``model`` that are not given are the checkpoint's."""
    precision: Literal["bf16", "fp16", "fp32", "fp64"] = "bf16"
    """Of compute. Masters, moments and reductions are FP32 (FP64 with fp64)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    loss_chunk: Count = 4096
    """Tokens whose logits exist at a time."""
    z_loss: Annotated[float, Field(ge=0)] = 0.0
    """Weight of log²Z in what is minimised (PaLM: 1e-4); ``loss`` in the metrics is the cross-entropy alone."""
    deterministic: bool = False
    """``torch.use_deterministic_algorithms``: same layout, same bits on CUDA too."""
    compile: CompileConfig = CompileConfig()
    float8: Float8Config = Float8Config()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    parallel: ParallelConfig = ParallelConfig()
    guard: GuardConfig = GuardConfig()
    forensics: ForensicsConfig = ForensicsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resume: ResumeConfig = ResumeConfig()
    data_skip: NonNegative = 0
    """With ``resume.step``: data steps that are never read, from the checkpoint's on."""
    validation: ValidationConfig = ValidationConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()
    verify_shards: bool = True
    """Compare every shard's SHA-256 at the start, each rank its share; files verified before are not read again."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        paths = [source.path.rstrip("/") for source in self.data]
        if len(set(paths)) < len(paths):
            raise ValueError(f"data: {max(paths, key=paths.count)!r} is given twice; expected one entry a source")
        if not any(source.weight > 0 for source in self.data):
            raise ValueError("data: expected a weight above 0")
        last = 0
        for number, phase in enumerate(self.phases):
            if phase.first_step <= last:
                raise ValueError(f"phases.{number}.first_step: expected more than {last}, got {phase.first_step}")
            if phase.weights is not None and len(phase.weights) != len(self.data):
                raise ValueError(
                    f"phases.{number}.weights: expected {len(self.data)} weights, one a source, "
                    f"got {len(phase.weights)}"
                )
            last = phase.first_step
        if self.forensics.steps and max(self.forensics.steps) >= self.steps:
            raise ValueError(
                f"forensics.steps: expected steps below {self.steps} (steps), got {max(self.forensics.steps)}"
            )
        if self.precision == "fp16" and self.guard.non_finite == "continue":
            raise ValueError(
                "guard.non_finite: expected skip with precision fp16, whose loss scale grows until gradients overflow, "
                "got continue"
            )
        if self.precision == "fp16" and self.float8.recipe is not None:
            raise ValueError(f"float8.recipe: expected null with precision fp16, or bf16, got {self.float8.recipe}")
        if self.precision == "fp64" and self.float8.implementation == "torchao":
            raise ValueError("float8.implementation: torchao sums in float32; expected quern with precision fp64")
        if self.resume.from_store and self.checkpoint.store is None:
            raise ValueError("resume.from_store: expected only together with checkpoint.store")
        for name, value in (("data_skip", self.data_skip), ("resume.again", self.resume.again)):
            if value and self.resume.step is None:
                raise ValueError(f"{name}: expected only together with resume.step")
        return self
