"""Which tokens come next: recipes in tokens, and the invertible order."""
