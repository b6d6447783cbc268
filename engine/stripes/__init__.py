"""Stripes: chunks stored and read as shards over the members of a lake."""
