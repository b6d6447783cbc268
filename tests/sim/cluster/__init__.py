"""The simulator of a whole lake: members, names, heads and clients in one world."""
