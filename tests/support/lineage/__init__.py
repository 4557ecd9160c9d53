"""Data runs and training runs whose every token is known."""
