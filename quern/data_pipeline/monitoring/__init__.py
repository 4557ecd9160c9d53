"""Progress, heartbeat and status of a run."""
