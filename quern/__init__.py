"""quern turns a web crawl into tokens, and tokens into a language model."""

__version__ = "0.1.0"
