"""Metadata of a store: group commit, applier, checkpoint, recovery.  The journal decides; LMDB is an index of it."""
