"""S3 as the clients of other people speak it, each unmodified, against one engine."""
