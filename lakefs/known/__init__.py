"""Known names: what a client has learned about names, and repeats without a request while its stamps stand."""
