"""Restores duplicates whose kept document is purged."""
