"""Importance weights of documents against a target, and the choice of documents by them (DSIR, Xie et al. 2023)."""
