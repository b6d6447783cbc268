"""The trio client: engine, reconnecting, driver, `TrioLake`."""
