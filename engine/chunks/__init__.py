"""Content-addressed payload: received, hashed, written once, recorded, found, quarantined."""
