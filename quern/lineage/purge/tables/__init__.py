"""Readers of a run's tables for a purge."""
