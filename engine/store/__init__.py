"""One open store: puts its parts together, opens it, and stops it cleanly."""
