"""Checkpoints in an object store: addresses, owners, and what is brought from there."""
