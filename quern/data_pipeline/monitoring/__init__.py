"""How far a run is: progress, heartbeat and status."""
