"""Proves that nothing of what was purged is left."""
