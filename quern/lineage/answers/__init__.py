"""Answers to questions about runs, as plain data: what the lineage commands print, and Python code is given."""
