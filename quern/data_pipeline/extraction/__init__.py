"""The main text of an HTML page, as trafilatura finds it, in less time."""
