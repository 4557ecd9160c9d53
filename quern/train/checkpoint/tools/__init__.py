"""Tools on whole checkpoints: comparison, rewriting for another layout, export and sampling."""
