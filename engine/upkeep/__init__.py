"""Work beside the clients: garbage collection, compaction, scrub, and the check and rebuild of the index."""
