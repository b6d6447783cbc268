"""Serves the native protocol: listener, connections, workers, watches.

Knows the port `EngineService`, and nothing of the store.
"""
