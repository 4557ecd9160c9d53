"""A training loop in plain PyTorch that reads quern's order.

    torchrun --nproc-per-node 2 examples/plain_loop.py train.yaml checkpoints

The same command goes on from the newest checkpoint. Afterwards ``quern lineage exposure`` and ``quern lineage step``
answer for the run in the config's ``run_dir``.
"""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import quern

SAVE_EVERY = 5


def main(config: str, folder: str) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=50304, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    newest, start = os.path.join(folder, "newest.pt"), None
    if os.path.exists(newest):
        state = torch.load(newest, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    replicated = DistributedDataParallel(model)

    with quern.batches(config, rank, world, start) as batches:
        for batch in batches:
            for number, micro in enumerate(batch.micro_batches, 1):
                # The sum over this rank's targets, divided by the targets of all ranks; DDP divides by the ranks.
                last = number == len(batch.micro_batches)
                with nullcontext() if last else replicated.no_sync():
                    loss = replicated(**micro.for_transformers(), num_items_in_batch=batch.valid_tokens).loss
                    (loss * world).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            done = batch.step + 1
            if done % SAVE_EVERY == 0:
                if rank == 0:
                    os.makedirs(folder, exist_ok=True)
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": done}
                    with open(newest + ".part", "wb") as file:
                        torch.save(state, file)
                        file.flush()
                        os.fsync(file.fileno())
                    os.replace(newest + ".part", newest)
                batches.saved(done)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
