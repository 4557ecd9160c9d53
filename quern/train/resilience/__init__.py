"""Detection of problems in a running training run, and the reactions to them."""
