"""A whole data run: crawl → documents → duplicates → tokens → report."""
