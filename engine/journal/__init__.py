"""The write-ahead log: written, read back, salvaged."""
