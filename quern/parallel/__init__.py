"""Distributes a model over devices."""
