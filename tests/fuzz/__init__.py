"""Bytes that nobody sends, for everything in the gateway that reads bytes."""
