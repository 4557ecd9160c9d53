"""How long a training step takes: products, attention, memory and messages."""
