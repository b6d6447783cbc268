"""Transport: frames on Unix and TCP streams, socket helpers; and payload over RDMA: its port, libibverbs, movers."""
