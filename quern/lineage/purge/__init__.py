"""Permanently removes documents from a data run: selection, closure, removal, and tombstones."""
