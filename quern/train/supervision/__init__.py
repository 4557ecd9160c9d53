"""What starts a run's ranks again after a failure, and says what happened."""
