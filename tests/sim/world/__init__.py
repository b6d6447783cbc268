"""The simulated machine: disk, clock, network, threads, time."""
