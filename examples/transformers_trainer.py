"""transformers' Trainer, which reads quern's order.

    torchrun --nproc-per-node 2 examples/transformers_trainer.py train.yaml checkpoints

The same command goes on from the newest checkpoint. Afterwards ``quern lineage exposure`` and ``quern lineage step``
answer for the run in the config's ``run_dir``.
"""

import glob
import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import quern


class OrderedTrainer(Trainer):
    """Reads its dataset as it is: each rank is given its own micro-batches already."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None)


class Told(TrainerCallback):
    """Tells the ledger which steps are complete, and which are saved."""

    def __init__(self, batches):
        self.batches = batches

    def on_step_end(self, args, state, control, **kwargs):
        self.batches.complete(state.global_step)

    def on_save(self, args, state, control, **kwargs):
        self.batches.saved(state.global_step)


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Steps and paths of those that are whole: the Trainer writes this file last."""
    states = glob.glob(os.path.join(folder, "checkpoint-*", "trainer_state.json"))
    return [(json.loads(Path(state).read_text())["global_step"], os.path.dirname(state)) for state in states]


def main(config: str, folder: str) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=50304, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    start, newest = max(checkpoints(folder), default=(None, None))
    with quern.batches(config, rank, world, start, looks_ahead=True) as batches:
        trainer = OrderedTrainer(
            model=LlamaForCausalLM(shape),
            args=TrainingArguments(
                folder, max_steps=batches.steps, gradient_accumulation_steps=batches.accumulation,
                per_device_train_batch_size=batches.config.micro_batch,
                ignore_data_skip=True,  # the batches begin at ``start``
                save_steps=5, learning_rate=1e-3, report_to="none", disable_tqdm=True, use_cpu=True,
                ddp_backend="gloo", ddp_find_unused_parameters=False,
            ),
            train_dataset=batches.dataset(),
            callbacks=[Told(batches)],
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=newest)


if __name__ == "__main__":
    main(*sys.argv[1:])
