"""The head of a lake: the requests of an engine, served over members and names, with nothing on a disk."""
