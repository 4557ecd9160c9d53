"""Stages of the chain: URL filter, language, quality, PII, toxicity and purge list."""
