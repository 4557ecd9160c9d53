"""The writer process of a rank: ``python -m quern.train.checkpoint.save.writer DESCRIPTOR``.

It reads requests on standard input (:mod:`.messages`) and exits immediately when that is closed: its trainer has ended
then, and another may be cleaning up. ``DESCRIPTOR`` is that of the memory in which the trainer leaves its snapshots.
What anything prints here goes to standard error; answers have a descriptor of their own.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from typing import Any

from quern.train.checkpoint.format.files import TensorFile
from quern.train.checkpoint.save.messages import publication_from_json
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
        request = json.loads(requests.get())
        if "lay_out" in request:
            unfit = _attempt(work, request["lay_out"])
            continue
        try:
            done: Any
            if unfit is not None:
                raise unfit
            if "write" in request:
                done = {name: written.to_json() for name, written in work.write(request["write"]).items()}
            else:
                done = work.publish(publication_from_json(request["publish"]))
            answer = {"done": done}
        except Exception as error:
            answer = {"failed": describe(error)}
        _say(answers, json.dumps(answer).encode() + b"\n")


def _attempt(work: Work, files: Any) -> Exception | None:
    """Lay out; what goes wrong is the answer to the requests that follow."""
    try:
        work.lay_out([TensorFile.from_json(file) for file in files])
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
