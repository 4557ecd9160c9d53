"""Checkpoint files outside the run's folder: on the nodes' own disks, and in a store."""
