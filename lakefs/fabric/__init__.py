"""RDMA for clients: one queue pair to the engine, registered memory, and the way back to TCP."""
