"""Turns bytes into chunks and manifests, and back.  In Python only `verify` compares bytes with ids and checksums."""
