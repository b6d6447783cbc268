"""The shared index, which the engine shares with clients on its machine: its bytes, its table, its reader."""
