"""Payload files: gives out places once; writes, syncs, reads and punches them.  Knows no names and no tables."""
