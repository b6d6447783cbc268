"""Storing objects: sources, lent memory, one object, many objects."""
