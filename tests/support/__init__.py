"""What several test files use, imported as ``support`` (``pythonpath`` in pyproject.toml)."""
