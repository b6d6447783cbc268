"""Counts, metrics and the access log of S3 traffic."""
