"""Upkeep of a lake: its loops, the requests for gc, fsck and scrub over all members, and its part of the status."""
