"""Corpora, runs and checkpoints small enough for a test, and what watches a trainer."""
