"""Runs an example of ``examples/`` on a rank, and writes down what its model is shown, as :mod:`.recorder` does.

    record_example.py RECORDS LIFE STOP EXAMPLE.py ARGUMENTS…

The rank is killed when the model is about to be shown something of step ``STOP``.
"""

import os
import runpy
import sys
from pathlib import Path

import numpy as np
from transformers import LlamaForCausalLM

from quern.train.training_batches import TrainingBatches


def main(records: str, life: int, stop: int, example: str, *arguments: str) -> None:
    file = Path(records, f"life{life}.rank{os.environ['RANK']}").open("wb", buffering=0)  # noqa: SIM115
    now, calls = [-1], [0]
    take, forward = TrainingBatches.__next__, LlamaForCausalLM.forward

    def taken(self):
        batch = take(self)
        now[0], calls[0] = batch.step, 0
        return batch

    def shown(self, **inputs):
        if now[0] == stop:
            os._exit(9)
        tokens_BL, targets_BL = (inputs[name].numpy().astype("<i8") for name in ("input_ids", "shift_labels"))
        file.write(np.array([now[0], calls[0], *tokens_BL.shape], "<i8").tobytes())
        file.write(tokens_BL.tobytes() + targets_BL.tobytes())
        calls[0] += 1
        return forward(self, **inputs)

    TrainingBatches.__next__, LlamaForCausalLM.forward = taken, shown
    sys.argv = [example, *arguments]
    runpy.run_path(example, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
