"""Hostile files and pages, WARC files with known damage, random runs for duplicate removal."""
