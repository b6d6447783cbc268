"""Known names: clients that answer from their own memory, beside clients that ask each time."""
