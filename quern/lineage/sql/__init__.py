"""SQL over the tables of a run, that reads its views and nothing else."""
