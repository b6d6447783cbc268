"""Trees: local folders stored as objects, and objects written to local folders."""
