"""Processes of a run: how they start, meet and agree."""
