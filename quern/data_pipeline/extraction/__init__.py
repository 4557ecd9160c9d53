"""The main text of an HTML page, equal to trafilatura's but computed faster."""
