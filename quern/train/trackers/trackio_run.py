"""Writes a branch as a run of Trackio: in ``TRACKIO_DIR``, or on the server of ``TRACKIO_SERVER_URL``."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import trackio

from quern.train.trackers.backend import Opening, Point

__all__ = ["TrackioRun"]


class TrackioRun:
    """A run in a project, known by its name. See :class:`quern.train.trackers.backend.Backend`."""

    def __init__(self, opening: Opening) -> None:
        self.id = opening.id or f"{opening.name}-{uuid.uuid4().hex[:8]}"
        config = {**opening.config, "quern": dict(opening.described), "tags": [*opening.tags]}
        if opening.parent is not None:
            config["parent"] = {"run": opening.parent.id, "step": opening.parent.step}
        self._run = trackio.init(
            project=opening.project, name=self.id, group=opening.group, config=config, embed=False,
            resume="never" if opening.id is None else "must", auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip

    def log(self, points: Sequence[Point]) -> None:
        """See the protocol."""
        for point in points:
            self._run.log(dict(point.numbers), step=point.step)

    def close(self, how: str) -> None:
        """See the protocol."""
        self._run.finish()
