"""What reads whole checkpoints: comparison, rewriting for another layout, export and sampling."""
