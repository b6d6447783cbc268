"""Storing: sources, lent memory, one object, many objects."""
