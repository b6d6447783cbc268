"""Keyed blobs found and read without a request, by clients of a real engine."""
