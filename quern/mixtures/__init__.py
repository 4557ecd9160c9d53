"""Mixtures: recipes in tokens, and the invertible training order."""
