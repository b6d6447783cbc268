"""Mounting and unmounting: mount points, the kernel's table of mounts, libfuse."""
