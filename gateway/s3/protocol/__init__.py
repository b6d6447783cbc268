"""What S3's bytes mean (sans-IO): signatures, targets, checksums, XML, tags, errors."""
