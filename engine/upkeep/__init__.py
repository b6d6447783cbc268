"""Work beside the clients: garbage collection, compaction, scrub, and the index checked and rebuilt."""
