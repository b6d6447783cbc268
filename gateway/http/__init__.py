"""HTTP/1.1 for the S3 face: parsing (pure), and the connections that carry the bytes."""
