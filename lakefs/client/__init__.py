"""The clients: `connect`, `connect_trio`, and the search for an engine's address."""
