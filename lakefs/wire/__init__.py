"""The native protocol, sans-IO: frames, messages, connection states, and the port between clients and engine."""
