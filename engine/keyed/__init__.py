"""Keyed blobs: spaces, and values written once under keys; their decisions, quotas, eviction and expiry."""
