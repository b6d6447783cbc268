"""One lake on many members, pure: the ring and its table, places of shards, the erasure code.  No I/O."""
