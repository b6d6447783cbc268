"""Simulated clients and what happens beside them, drawn from a seed."""
