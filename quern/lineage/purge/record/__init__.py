"""Records of a purge: journal, audit log and tombstones."""
