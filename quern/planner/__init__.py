"""Estimates what a training step will need and take before any GPU is rented. Imports no torch."""
