"""Reading: open, fetch, check; ranges, pools, mappings, prefetch."""
