"""The tables: the overlay (memtable) over LMDB, views of both at one instant, transactions, counters."""
