"""Determines which documents a purge takes: the selected ones and those that go with them."""
