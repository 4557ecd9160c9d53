"""The index of a data run below ``RUN/lineage``: derived from its other files, built when asked, deleted at will."""
