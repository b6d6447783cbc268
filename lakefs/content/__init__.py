"""Turns bytes into chunks and manifests, and back.  Only `verify` compares bytes with ids and checksums."""
