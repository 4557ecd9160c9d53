"""What is written of a purge: journal, audit log and tombstones."""
