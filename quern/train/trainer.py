"""The training loop. :mod:`quern.train.setup` builds everything that it needs."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import nn

from quern.closes import Closes
from quern.parallel.apply import Parallel
from quern.parallel.clip import clip_divisor
from quern.train.batches.feed import Feed, StepInputs
from quern.train.begin import Start
from quern.train.checkpoint.format.manifest import Position
from quern.train.checkpoint.format.state import TrainState
from quern.train.checkpoint.save.async_save import Progress
from quern.train.checkpoint.save.manager import CheckpointManager
from quern.train.checkpoint.save.scheduler import CheckpointScheduler
from quern.train.config import TrainConfig
from quern.train.doremi import DoReMi
from quern.train.history.health import HealthTracker
from quern.train.history.ledger import Ledger
from quern.train.processes import launch
from quern.train.processes.machine import collecting
from quern.train.processes.ranks import Ranks
from quern.train.step import figures
from quern.train.step.by_rank import RankFigures
from quern.train.step.by_source import SourceLosses
from quern.train.step.forensics import Forensics
from quern.train.step.guard import Guard, Health
from quern.train.step.metrics import Mark, Metrics, Utilisation, memory_gib
from quern.train.step.optimizer import Optimizer
from quern.train.step.optimizer import step as update
from quern.train.step.placement import Placement
from quern.train.step.precision import LossScale, precision_of
from quern.train.step.profile import Profiler
from quern.train.step.schedule import learning_rate, share_after_spikes
from quern.train.step.validation import Validator
from quern.train.supervision import beats
from quern.train.supervision.back import GoingBack
from quern.train.supervision.device_watch import DeviceWatch, as_fact
from quern.train.supervision.link_probe import LinkProbe
from quern.train.supervision.recomputation import Recomputation
from quern.train.supervision.replicas import Replicas
from quern.train.supervision.stragglers import Stragglers
from quern.train.supervision.watchdog import Watchdog
from quern.train.trackers.trackers import Trackers

__all__ = ["Trainer"]

log = logging.getLogger(__name__)


@dataclass
class Trainer(Closes):
    """A run in progress. Use as a context manager: leaving it ends threads and closes files."""

    config: TrainConfig
    ranks: Ranks
    start: Start
    parallel: Parallel
    optimizer: Optimizer
    feed: Feed
    guard: Guard
    forensics: Forensics
    by_source: SourceLosses
    by_rank: RankFigures
    stragglers: Stragglers
    link_probe: LinkProbe
    loss_scale: LossScale
    checkpoints: CheckpointManager
    state: TrainState
    validator: Validator | None
    """None: no held-out documents."""
    doremi: DoReMi | None
    profiler: Profiler
    utilisation: Utilisation
    ledger: Ledger | None
    metrics: Metrics | None
    trackers: Trackers | None
    """On rank 0 only, as the metrics and the ledger."""
    stopped_by: str | None = None
    """The signal that ended the run early."""
    on_gradients: Callable[[Trainer, int], None] | None = None
    """Called when a step's gradients are summed and not yet clipped: where a test or a forensic tool looks."""
    _pending: list[figures.Pending] = field(default_factory=list)
    _signal: int = 0
    _tokens: int = 0
    _held_out: float = 0.0  # loss of the last validation
    _divisor: torch.Tensor | None = None  # of the step's gradients, where the optimizer clips them
    back: GoingBack = field(init=False)
    watchdog: Watchdog = field(init=False)
    device_watch: DeviceWatch = field(init=False)
    saves: CheckpointScheduler = field(init=False)
    replicas: Replicas = field(init=False)
    recomputation: Recomputation = field(init=False)
    placement: Placement = field(init=False)
    _mark: Mark = field(init=False)  # since when a step's time runs

    def __post_init__(self) -> None:
        self._tokens = self.start.tokens
        self.done = self.start.step  # optimizer steps that are complete
        self._skips, self._spikes = self.start.skips, [*self.start.spikes]
        self.back = GoingBack(self.config, self.start.mixture.order.hash, self.start.backs, self.ledger, self.ranks)
        self.watchdog = Watchdog(self.config, self.ranks, self.start.step)
        self.device_watch = DeviceWatch(self.config.device_check_s, self.ranks)
        health = HealthTracker.from_ledger(self.ledger.entries if self.ledger else [], self.config.guard.health_window)
        self.saves = CheckpointScheduler(
            self.config.checkpoint, self.checkpoints, health, self.ledger, self.ranks.world, self.start.step
        )
        interval, held = self.config.replicas.interval, replace(self.parallel.gradients, model=self.parallel.weights)
        self.replicas = Replicas(interval, held, self.optimizer, self.ranks, self.start.step)
        self.recomputation = Recomputation(self.config, self.parallel, self.loss_scale, self.ranks, self.start.step)
        self.placement = Placement(self.parallel, self.optimizer, self.ledger)
        self._master = precision_of(self.config.precision).master

    def fit(self) -> None:
        """Train to ``config.steps``, or until a signal asks for an end; the last step is always saved."""
        self.saves.prepare(self._everything())
        self.start_loop()
        free = signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN)
        asks = self.forensics.request if self.config.forensics.window and free else None
        with (
            launch.listening(self.asked_to_stop, asks), self.profiler, self.watchdog, self.device_watch,
            collecting(self.config.process.gc_interval) as collect, beats.telling() as tell,
        ):  # fmt: skip
            for step in self.steps():
                tell(step)
                self.train_step(step)
                if step == self.start.step:
                    self.ranks.wait_at_most(self.config.comm.timeout_s)
                if self.link_probe.asked:
                    self.measure_links(step)
                self.validate_if_due(step)
                self.save_if_due(step)
                self.profiler.step(step)
                collect(step)
            self.watchdog.enter("end")
            self.finish()

    def start_loop(self) -> None:
        """Start prefetching data and the step timer."""
        self.feed.start(self.start.data_step, self.start.data_step + self.config.steps - self.start.step)
        self._mark = Mark(self.ranks.device)

    def train_step(self, step: int) -> None:
        """Run one step, without what is not done in each: validation, saving, tracing."""
        self.watchdog.enter("data", step)
        batch = self.feed.take(self.data_step(step))
        if self.doremi is not None:
            self.watchdog.enter("doremi")
            batch = self.doremi.weighed(batch, learn=batch.data_step not in self.start.left_out)
        loss = self.forward_backward(batch)
        self.recomputation.check(step + 1, batch, self.watchdog.enter)
        norm = self.clip(step)
        health = self.guard.judge(loss, norm, left_out=batch.data_step in self.start.left_out)
        self.update(step, health)
        if self.replicas.due(step + 1):
            self.replicas.compare(step + 1, self._scalars())
        self.report(step, batch, norm, health)

    def steps(self) -> Iterator[int]:
        """Iterate over the remaining steps (the first of a run is 0); ends early when all ranks know of a signal."""
        yield from takewhile(lambda _: self.stopped_by is None, range(self.start.step, self.config.steps))

    def data_step(self, step: int) -> int:
        """The data step that an optimizer step reads."""
        return self.start.data_step + step - self.start.step

    def forward_backward(self, batch: StepInputs) -> torch.Tensor:
        """Gradients of the mean objective over the global batch's targets; returns the mean cross-entropy, the same on
        every rank."""
        self.watchdog.enter("forward")
        self.optimizer.zero_grad(set_to_none=True)
        kept = batch.micro_batches if self.config.forensics.window else ()
        sequences = self.start.mixture.order.global_batch_at(batch.data_step)
        self.parallel.begin(sequences, self.loss_scale.scale, kept)

        def weigh(loss_sum: torch.Tensor) -> torch.Tensor:  # by all targets of the step: ranks have unequal numbers
            self.by_rank.worked()
            self.watchdog.enter("backward")
            return self.loss_scale.scaled(loss_sum / batch.valid_tokens)

        losses: dict[int, torch.Tensor] | None = {} if self.parallel.run.counts else None
        self.by_rank.begin()
        watched = self.recomputation.watched(self.done + 1, self.saves.due(self.done + 1), batch, weigh)
        sums = self.parallel.run.forward_backward(batch.micro_batches, watched, losses)
        self.forensics.keep(batch, losses, [] if self.parallel.loads is None else self.parallel.loads.routed())
        self.watchdog.enter("reduce")
        self.by_rank.wait()
        self.parallel.gradients.finish()
        save = self.saves.progress()
        stop = self._signal or self.device_watch.failing is not None
        mine = figures.of_this_rank(
            sums / batch.valid_tokens, self._master, stop=stop, saves_ended=save.ended,
            saves_published=save.published, asked=self.forensics.take_request(),
            links=self.link_probe.take_request(),
        )  # fmt: skip
        behind = self.by_source.of_this_rank(batch, losses, mine), self.by_rank.of_this_rank(batch.data_step, mine)
        self._summed = self.ranks.sum(torch.cat((mine, *behind)))
        self.by_rank.waited()
        return self._summed[1]

    def clip(self, step: int) -> torch.Tensor:
        """The gradient's norm over all parameters and ranks; :meth:`update` clips by it to ``optimizer.clip``."""
        gradients = self.parallel.gradients
        self.loss_scale.unscale_(gradients.parameters)
        if self.on_gradients is not None:
            self.on_gradients(self, step)
        norm = gradients.norm(self.forensics.norms)
        self._divisor, most = None, self.config.optimizer.clip
        if most is not None and norm.dtype == torch.float32:
            self._divisor = clip_divisor(most, norm)
        elif most is not None:  # the kernel knows a divisor in float32 alone
            gradients.clip(most, norm)
        return norm

    def update(self, step: int, health: Health) -> None:
        """Take one optimizer step, or none if the guard says so; the host does not know which."""
        self.watchdog.enter("optimizer")
        self.saves.wait_staged()  # or the copy would hold some weights of after
        self.loss_scale.update(health.non_finite)
        update(self.optimizer, self._lr(step), health.skip, self._divisor)
        self.placement.follow(step + 1)
        self._tokens += self._sequences(step) * self.config.seq_len
        self.done = step + 1

    def report(self, step: int, batch: StepInputs, norm: torch.Tensor, health: Health) -> None:
        """Send the step's figures to the host asynchronously, and read those of the step before."""
        self.watchdog.enter("metrics")
        values = figures.pack(self._summed, norm=norm, scale=self.loss_scale.scale, **health.figures())
        loads = None if self.parallel.loads is None else self.parallel.loads.sent()
        self._pending.append(figures.Pending(
            step, batch.data_step, batch.valid_tokens, values, self._lr(step), self._tokens, batch.wait_s, loads,
            None if self.doremi is None else self.doremi.sent(), Mark(self.ranks.device),  # after all of these
        ))  # fmt: skip
        self.drain_metrics(keep=1)

    def drain_metrics(self, keep: int = 0) -> None:
        """Read the figures of all steps but the newest ``keep``: metrics, ledger, and whether to stop."""
        self.back.judge_copies(self.recomputation.found)  # before its data are blamed for what a rank got wrong
        while len(self._pending) > keep:
            pending = self._pending.pop(0)
            pending.ended.wait()
            found, behind = figures.unpack(pending.values)
            self.by_rank.settle(pending.wait_s)
            self._read(pending, found, behind)
            self.forensics.settle(pending, found)
            self.saves.advance(Progress(int(found.saves_ended), int(found.saves_published)))
            self.back.judge(pending.step, pending.data_step, found, self._skips)
            self.link_probe.asked |= found.links > 0
        self.back.judge_copies(self.replicas.settle(self.done - keep))

    def _read(self, pending: figures.Pending, found: figures.Figures, behind: list[float]) -> None:
        if found.stop and self.stopped_by is None:
            here = "the state of a GPU" if self.device_watch.failing else "signal to another rank"
            self.stopped_by = signal.Signals(self._signal).name if self._signal else here
            if self.ledger is not None:
                log.info("%s: the step in work is finished and saved; the same command goes on", self.stopped_by)
        seconds, self._mark = pending.ended.since(self._mark), pending.ended
        left_out = pending.data_step in self.start.left_out
        self._skips = self._skips + (not left_out) if found.skipped else 0
        self._spikes += [pending.step] if found.loss_spike or found.norm_spike else []
        where, num = {"step": pending.step, "data_step": pending.data_step}, len(self.by_source)
        if self.ledger is None or self.metrics is None:
            return
        if found.skipped:
            figures.warn_of_skip(pending, found, left_out, self._skips, self.config.guard.max_skips)
        figures.note_abnormal(self.ledger, where, found, left_out)
        self.saves.step(pending.step, not any(found.flags.values()), seconds)
        speed = self._sequences(pending.step) * self.config.seq_len / seconds
        row = {
            **where, "attempt": self.start.attempt, "loss": found.loss, "grad_norm": found.norm, "lr": pending.lr,
            "tokens": pending.tokens, "valid_tokens": pending.valid_tokens, "tokens_per_s": speed,
            "step_time_s": seconds, "data_wait_s": pending.wait_s, "memory_gib": memory_gib(self.ranks.device),
            **self.utilisation.of(speed), **found.flags, "losses_by_source": self.by_source.read(behind[:num]),
            **self.by_source.shares(pending.data_step), **self.by_rank.read(pending.data_step, behind[num:]),
        }  # fmt: skip
        if self.parallel.loads is not None and pending.loads is not None:
            counts = figures.has_counts(pending.step, self.config.steps) or self._last(pending.step + 1)
            row["experts"] = self.parallel.loads.read(pending.loads, counts=counts)
        self.stragglers.observe(pending.step, self.by_rank.work_s)
        self.link_probe.observe(self.by_rank.work_s, self.by_rank.comm_wait_s)
        row |= {"loss_scale": found.scale} if self.loss_scale.enabled else {}
        if self.doremi is not None and pending.learned is not None:
            row |= self.doremi.read(pending.learned) | {"objective": found.objective}
        self.metrics.report(
            row | ({"z_loss": found.objective - found.loss} if self.config.z_loss and not self.doremi else {})
        )

    def save_if_due(self, step: int) -> None:
        """Save every ``checkpoint.interval`` steps, after the last, and when a signal asks for an end."""
        done = step + 1
        if not (self.saves.due(done) or (self._last(done) and self.saves.saved != done)):
            return
        self.watchdog.enter("save")
        self.replicas.compare(done, self._scalars())  # a load would make copies equal of what is saved of one of them
        self.drain_metrics()  # the ledger's lines about these weights precede their publication
        last = self._last(done)  # what was settled may have said so
        data_step, tokens, order = self.data_step(step) + 1, self._tokens, self.start.mixture.order.hash

        def position(offset: int) -> Position:
            return Position(data_step, tokens, order, offset, self.saves.scalars())

        self.saves.save(done, data_step, self._everything, position, last)
        self._mark = Mark(self.ranks.device)  # saving is no step's time

    def _last(self, done: int) -> bool:
        return done == self.config.steps or self.stopped_by is not None

    def _everything(self) -> TrainState:
        """What a checkpoint holds: weights and moments themselves, copies of what a step changes before those."""
        extra = {name: value.clone() for name, value in self._scalars().items()}
        return TrainState(self.parallel.weights, self.optimizer, self.state.facts, extra)

    def _scalars(self) -> dict[str, torch.Tensor]:
        """What a step changes besides weights and moments, the same on every rank."""
        kept = {f"guard.{name}": value for name, value in self.guard.state_dict().items()}
        kept |= {f"loss_scale.{name}": value for name, value in self.loss_scale.state_dict().items()}
        kept |= {} if self.doremi is None else {f"doremi.{n}": value for n, value in self.doremi.state_dict().items()}
        return kept | self.parallel.extra()

    def measure_links(self, step: int) -> None:
        """Measure the links between ranks, if the run is not to end."""
        self.drain_metrics()
        if self.stopped_by is None:
            self.watchdog.enter("links")
            self.link_probe.measure(step)
            self._mark = Mark(self.ranks.device)  # it is no step's time

    def validate_if_due(self, step: int) -> None:
        """Compute the held-out loss every ``validation.interval`` steps and after the last."""
        done, interval = step + 1, self.config.validation.interval
        if self.validator is None or (done < self.config.steps and not (interval and done % interval == 0)):
            return
        self.watchdog.enter("validation")
        self.drain_metrics()
        if self.stopped_by is not None:
            self.save_if_due(step)  # a signal leaves little time, and a resumed run does not repeat this
        with self.parallel.evaluating():
            losses = self.validator.run(self.parallel.run)
        self._held_out = losses["loss"]
        if self.metrics is not None:
            self.metrics.validation(done, losses)
        self._mark = Mark(self.ranks.device)

    def finish(self) -> None:
        """Record how the run ended (ledger). No rank leaves before: a launcher ends the others when one has left."""
        self.drain_metrics()
        if self.forensics.take_request():
            log.warning("no step was left to write down for the SIGUSR1 that came in the last one")
        failing = [] if self.complete else self.device_watch.found()
        if self.ledger is not None:
            if self._skips:
                which = "step was" if self._skips == 1 else f"{self._skips} steps were"
                log.warning("the last %s skipped: the weights are those after step %d", which, self.done - self._skips)
            if not math.isfinite(self._held_out):
                log.warning("the held-out loss is not finite: the weights are of no use")
            why = {} if self.complete else as_fact(failing, str(self.stopped_by))
            self.ledger.append("end" if self.complete else "stopped", step=self.done, **why)
        self.checkpoints.tiers.finish(hurry=self.stopped_by is not None)
        self.ranks.barrier()
        self.device_watch.leave_if(failing, self.done)
        if self.trackers is not None:  # the others do not wait for a tracker
            self.trackers.finish("finished" if self.complete else "stopped")

    def close(self) -> None:
        """Stop threads, close files and release the run's lock."""
        for own in (self.feed, self.metrics, self.trackers, self.ledger, self.checkpoints):
            if own is not None:
                own.close()

    def _lr(self, step: int) -> float:
        rate = learning_rate(step, self.config.steps, self.config.optimizer.lr, self.config.schedule)
        return rate * share_after_spikes(step, self._spikes, self.config.guard)

    def _sequences(self, step: int) -> int:
        return self.start.mixture.order.global_batch_at(self.data_step(step))

    @property
    def model(self) -> nn.Module:
        """This rank's parameters under their global names."""
        return self.parallel.model

    @property
    def complete(self) -> bool:
        """Whether all steps are done."""
        return self.done >= self.config.steps

    def asked_to_stop(self, number: int) -> None:
        """A signal has arrived: the current step and the next one are finished and saved."""
        self._signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the second one is Python's own
