"""All tables at one instant: the overlay (memtable) over LMDB; views, transactions, counters."""
