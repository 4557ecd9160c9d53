"""Ranks, what they run, and what watches them."""
