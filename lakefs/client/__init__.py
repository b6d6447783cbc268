"""Connected clients: `connect`, `connect_trio`, and how they find an engine."""
