"""Containers: gzip members, ranges of a large file, WARC records."""
