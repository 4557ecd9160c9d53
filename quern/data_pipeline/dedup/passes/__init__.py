"""The passes of duplicate removal: exact, URL, near, and the tables of decisions."""
