"""What maintainers run: setup, locks, and the generated reference."""
