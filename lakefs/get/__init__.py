"""Reading objects and chunks: open, fetch, check; ranges, pools, mappings, prefetch."""
