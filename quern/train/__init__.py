"""The training loop and everything that keeps it running."""
