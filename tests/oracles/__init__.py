"""Twins in plain Python of the product's native code: slower; tests compare the two."""
