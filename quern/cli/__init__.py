"""The command line: it parses, composes and prints; the wings do the work."""
