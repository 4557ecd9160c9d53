"""Finds which documents were in the batch of a spike of loss or gradient norm."""
