"""Exports tokens to other trainers' formats and imports theirs, with a sidecar that preserves lineage."""
