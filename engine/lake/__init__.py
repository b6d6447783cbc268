"""One lake over the devices of a machine: the process that serves it, and those of its members."""
