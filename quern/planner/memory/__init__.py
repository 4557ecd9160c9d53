"""Memory of a rank in a training step: what it keeps, component by component, and its peak. Imports no torch."""
