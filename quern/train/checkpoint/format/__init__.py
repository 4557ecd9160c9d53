"""A checkpoint on disk: its manifest, files, metadata and state."""
