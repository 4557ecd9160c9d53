"""A save: snapshot, writing in the background, publication."""
