"""Sharded checkpoints, published atomically and loadable on any layout."""
