"""The log of groups of names in the coordinator: appended to by the replica that leads, taken by those that follow."""
