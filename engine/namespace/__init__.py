"""Names, nodes, buckets, versions, access keys: decisions on one view or transaction.  No I/O, no segments."""
