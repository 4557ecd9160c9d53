"""Finds which training runs have read what is purged, and from where they can continue."""
