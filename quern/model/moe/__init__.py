"""Mixture of experts: layers of many feed-forward networks, of which each token uses a few."""
