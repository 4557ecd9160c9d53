"""Compressed files and the records in them: gzip members, ranges of a large file, WARC records."""
