"""Which documents a purge takes: those selected, and their duplicates."""
