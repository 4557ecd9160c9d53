"""When a run saves, and which checkpoints stay."""
