"""How long a training step takes: products, attention, memory, messages, and the schedule that orders them."""
