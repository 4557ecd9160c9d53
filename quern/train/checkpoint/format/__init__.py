"""A checkpoint on disk: its manifest, files, metadata, and the state in it."""
