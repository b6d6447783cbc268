"""Programs for maintainers: setup, locks, and the generated reference."""
