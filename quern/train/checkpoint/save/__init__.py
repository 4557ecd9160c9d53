"""Saving a checkpoint: snapshot, background write, publication."""
