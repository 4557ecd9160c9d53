"""Which duplicates come back when what they were removed for is purged."""
