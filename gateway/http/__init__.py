"""HTTP/1.1 for the S3 face: what bytes mean (pure), and the connections that carry them."""
