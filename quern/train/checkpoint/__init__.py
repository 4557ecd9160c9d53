"""Sharded checkpoints: published whole or not at all, loaded on any layout."""
