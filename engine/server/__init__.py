"""The native protocol served: listener, connections, workers, watches.

Knows the port `EngineService` and nothing of the store.
"""
