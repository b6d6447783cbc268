"""One handler for each message of the wire.  `table` lists them; arguments are checked here."""
