"""The commit: group commit, applier, checkpoint, recovery.  The journal is the truth, LMDB its index."""
