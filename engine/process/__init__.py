"""One engine process: starts it with the given front ends, handles signals, drains it; or embeds it in a caller."""
