"""Parts of a step: optimizer, learning rate, precision, metrics, validation, guard and forensics."""
