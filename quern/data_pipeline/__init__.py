"""Crawl to clean, unique documents."""
