"""Memory shared with other processes: sealed (ours), backed by a file, lent (theirs)."""
