"""Files that identify and protect a store: superblock and lock, reserve, token, first key."""
