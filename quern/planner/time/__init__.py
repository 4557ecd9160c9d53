"""How long a training step takes: products, attention, memory, messages, and the schedule that orders them."""

from quern.planner.time.estimate import StepTime, estimate

__all__ = ["StepTime", "estimate"]
