"""Documents of a source that are chosen by a condition, and the stream that they make laid end to end."""
