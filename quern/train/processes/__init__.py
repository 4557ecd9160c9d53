"""Processes of a run: start, rendezvous and agreement."""
