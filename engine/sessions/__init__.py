"""Sessions, leases and lent memory of each connection; gc reads here which chunks they reference."""
