"""Known names: the native table."""
