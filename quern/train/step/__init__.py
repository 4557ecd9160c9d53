"""What surrounds a step: optimizer, learning rate, precision, metrics, validation, guard and forensics."""
