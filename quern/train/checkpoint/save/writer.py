"""The writer process of a rank: ``python -m quern.train.checkpoint.save.writer DESCRIPTOR``.

It reads requests on standard input (:mod:`.messages`) and exits immediately when that is closed: its trainer has ended
then, and another may be cleaning up. ``DESCRIPTOR`` is that of the memory in which the trainer leaves its snapshots.
What anything prints here goes to standard error; answers have a descriptor of their own.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Sequence

from quern.train.checkpoint.format.files import TensorFile
from quern.train.checkpoint.save.messages import from_line, to_line
from quern.train.checkpoint.save.snapshot import Memory
from quern.train.checkpoint.save.work import Work
from quern.train.processes.agree import describe

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve requests until standard input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    work, unfit = Work(Memory(descriptor)), None
    while True:
        kind, content = from_line(requests.get())
        if kind == "lay_out":
            unfit = _attempt(work, content)
            continue
        try:
            if unfit is not None:
                raise unfit
            answer = to_line("done", work.write(content) if kind == "write" else work.publish(content))
        except Exception as error:
            answer = to_line("failed", describe(error))
        _say(answers, answer.encode() + b"\n")


def _attempt(work: Work, files: Sequence[TensorFile]) -> Exception | None:
    """Lay out; what goes wrong is the answer to the requests that follow."""
    try:
        work.lay_out(files)
    except Exception as error:
        return error
    return None


def _listen(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


def _say(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
