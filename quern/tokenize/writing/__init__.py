"""Writes shards from documents: order, encoding, sorted runs, merge."""
