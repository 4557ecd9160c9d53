"""The history of a run: its ledger, branches, health of checkpoints, and the readers of a corpus."""
