"""Sync and diff: two sides (a folder, a bucket or a prefix of it) compared name by name, and one made like the other."""
