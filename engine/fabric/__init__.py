"""RDMA: the engine's device, its queue pairs, registered slabs of the DRAM tier, and memory to move bytes through."""
