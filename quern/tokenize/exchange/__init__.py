"""Tokens to other trainers' formats, and from them: export, import, and the sidecar that keeps lineage between."""
