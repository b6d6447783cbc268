"""Twins in plain Python of what the product does natively: slower, and held equal to it by tests."""
