"""Memory, files and queue pairs that the engine shares with a client: found, renewed, forgotten, closed in order."""
