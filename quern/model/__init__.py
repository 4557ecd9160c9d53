"""The network, knowing nothing of devices."""
