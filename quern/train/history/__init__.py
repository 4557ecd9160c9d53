"""What a run has done: its ledger, branches, the health of its checkpoints, and who reads a corpus."""
