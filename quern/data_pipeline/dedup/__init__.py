"""Duplicate removal: signatures → bands → candidates → verified pairs → survivors."""
