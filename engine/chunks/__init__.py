"""Content-addressed payload: receives, hashes, writes once, records, finds and quarantines chunks."""
