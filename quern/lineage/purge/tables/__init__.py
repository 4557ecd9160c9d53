"""A run's tables as a purge reads them."""
