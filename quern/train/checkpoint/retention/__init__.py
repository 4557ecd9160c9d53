"""When a run saves, and which checkpoints are kept."""
