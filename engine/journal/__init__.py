"""The journal, a write-ahead log: its writer, its reader, and salvage of a damaged one."""
