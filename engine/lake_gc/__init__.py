"""Garbage collection over a lake: cycles of generations, driven by the walk through its names."""
