"""Turns bytes into chunks and manifests, and back.  `verify` has the checks that clients make in Python."""
