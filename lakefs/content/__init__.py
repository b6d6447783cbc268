"""Bytes to chunks to manifests and back; `verify` is the one place that compares bytes with ids and checksums."""
