"""S3's formats (sans-IO): signatures, targets, checksums, XML, tags, errors."""
