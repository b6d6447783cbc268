"""The lake as a tier for KV caches: what hosts of that kind share, and a module for each host."""
