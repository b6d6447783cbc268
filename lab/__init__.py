"""A machine in a box: a guest with RDMA, CXL memory, persistent memory and NVMe that this machine need not have."""
