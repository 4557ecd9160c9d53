"""SQL over the tables of a run, restricted to its views."""
