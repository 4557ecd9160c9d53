"""Checkpoints in an object store: addresses, ownership and downloads."""
