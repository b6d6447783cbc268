"""The S3 face: requests are authorized, dispatched to operations, and answered in S3's format."""
