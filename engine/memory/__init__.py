"""Memory shared with other processes: sealed memory of the engine, tables kept in a file, memory that clients lend."""
