"""Media in front of the segments, and what clients may read of them directly: the DRAM tier and the shared index."""
