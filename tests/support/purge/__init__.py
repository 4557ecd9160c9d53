"""Runs to be purged, purges that are killed, and what must be left."""
