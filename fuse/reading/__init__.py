"""Reads for the kernel: byte ranges of stored objects, each granule checked."""
