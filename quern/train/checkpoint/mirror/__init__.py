"""Copies of a checkpoint on the disks of other nodes."""
