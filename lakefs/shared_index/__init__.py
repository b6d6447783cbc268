"""The index that the engine shares with clients on its machine: its bytes, its table, its reader."""
