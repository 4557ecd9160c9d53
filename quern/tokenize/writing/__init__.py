"""From documents to shards: order, encoding, sorted runs, merge."""
