"""What one connection holds of the store: sessions, leases, lent memory; gc asks here what is referenced."""
