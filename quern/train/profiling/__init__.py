"""Profiles a short run of the real trainer, and attributes every instant of a step."""
