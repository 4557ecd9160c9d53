"""Context parallelism: the tokens of a sequence are dealt out over ranks."""
