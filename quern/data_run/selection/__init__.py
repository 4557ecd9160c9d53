"""Selects documents of a data run by importance weights against a target: ``quern mix select``."""
