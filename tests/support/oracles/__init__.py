"""What the package computes, written plainly and without it."""
