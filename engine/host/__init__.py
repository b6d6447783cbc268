"""The machine behind the ports: disk, io_uring, clock, descriptors, memory limits, failpoints.

The simulator replaces this room.
"""
