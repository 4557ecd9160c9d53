"""Lineage: where every token came from and which steps read it, from what the other packages wrote."""
