"""Task execution: on Ray or in this process, isolated, fenced, and committed to a run directory."""
