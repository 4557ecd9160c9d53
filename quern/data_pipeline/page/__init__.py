"""A page: its text, measurements, verdict, id and URL."""
