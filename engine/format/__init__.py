"""Every byte of a store: structs, records, extents, checksums, sizes.  No I/O."""
