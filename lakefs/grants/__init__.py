"""Grants to bytes in this process: segment descriptors, DRAM slabs, batches, read-ahead."""
