"""How a model is laid out over devices."""
