"""One open store: its parts put together, opened, and stopped cleanly."""
