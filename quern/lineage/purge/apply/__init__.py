"""The purge itself: new shards, texts, pages, in one transaction."""
