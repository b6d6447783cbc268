"""The members of a lake, as one process reaches them, and the ports that hide them."""
