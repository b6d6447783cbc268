"""Stamps, from which clients on the engine's machine see if an answer about names still stands: bytes and reader."""
