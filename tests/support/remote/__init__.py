"""Servers of objects and pages, with faults."""
