"""One module for each family of S3 operations."""
