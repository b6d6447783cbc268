"""Mounting and unmounting: mount points, the table of mounts, libfuse."""
