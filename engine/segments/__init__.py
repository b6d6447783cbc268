"""Payload files: places given out once, written, synced, read, punched.  Knows no names and no tables."""
