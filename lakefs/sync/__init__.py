"""Sync and diff: a folder, a bucket or a prefix of it, compared with another, name by name, and made like it."""
