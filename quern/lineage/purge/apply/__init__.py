"""Carries out a purge: new shards, texts and pages, in one transaction."""
