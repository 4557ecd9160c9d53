"""Duplicates: signatures → bands → candidates → verified pairs → survivors."""
