"""One lake over many members: the coordinator, mirrored disks, and what heads, names and members share."""
