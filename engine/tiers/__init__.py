"""Memory in front of the segments that clients may read directly: the DRAM tier and the shared index."""
