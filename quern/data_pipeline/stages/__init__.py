"""What each page passes: URL filter, language, quality, PII, toxicity and the purge list."""
