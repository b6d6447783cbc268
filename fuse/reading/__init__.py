"""Ranges for the kernel, each granule checked."""
