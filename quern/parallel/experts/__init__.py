"""Experts on several ranks: how their loads are balanced, and how tokens reach those that other ranks hold."""
