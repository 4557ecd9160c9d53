"""Tensor parallelism: splits matrices over ranks, and gathers and scatters what is between them."""
