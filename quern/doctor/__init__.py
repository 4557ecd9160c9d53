"""A preflight check that finds machines which would make a run fail or slow: ``quern doctor``."""
