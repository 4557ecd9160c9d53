"""The lineage index of a data run in ``RUN/lineage``: derived from its other files, built on demand, safe to delete."""
