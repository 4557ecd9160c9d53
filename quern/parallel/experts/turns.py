"""Two pieces of work in turns: while rows of one are under way, the other is computed.

A piece is a forward or a backward of a micro-batch, each in a thread of its own, of which one runs at a time. So what a
rank does, and in which order its collectives begin, is as fixed as without threads.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from threading import Condition, Thread

import torch

__all__ = ["BACKWARD", "FORWARD", "in_turns", "pass_on"]

FORWARD, BACKWARD = 0, 1
"""Whose turn it is. By what is done, not by the thread: autograd has threads of its own."""


class _Turns:
    def __init__(self) -> None:
        self._changed = Condition()
        self._turn, self._ended = FORWARD, [False, False]

    def wait(self, piece: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == piece or self._ended[1 - piece])

    def pass_on(self, piece: int) -> None:
        with self._changed:
            self._turn = 1 - piece
            self._changed.notify_all()
        self.wait(piece)

    def end(self, piece: int) -> None:
        with self._changed:
            self._turn, self._ended[piece] = 1 - piece, True
            self._changed.notify_all()


_turns: _Turns | None = None


def pass_on(piece: int) -> None:
    """Rows of this piece are under way: the other goes on, until its own are, or to its end. Nothing where there is no
    other."""
    if _turns is not None:
        _turns.pass_on(piece)


def in_turns(forward: Callable[[], None], backward: Callable[[], None]) -> None:
    """Both, beginning with the first. Raises what one of them raised, after the end of both."""
    global _turns
    turns = _Turns()
    raised: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    streams = [] if device is None else [torch.cuda.current_stream()]

    def run(piece: int, work: Callable[[], None]) -> None:
        turns.wait(piece)
        try:
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            turns.end(piece)

    def beside(streams: Sequence[torch.cuda.Stream]) -> None:
        for stream in streams:  # a thread begins with the default ones
            torch.cuda.set_stream(stream)
        run(BACKWARD, backward)

    thread = Thread(target=contextvars.copy_context().run, args=(beside, streams), daemon=True)
    _turns = turns
    try:
        thread.start()
        run(FORWARD, forward)
        thread.join()
    finally:
        _turns = None
    if raised:
        raise raised[0]
