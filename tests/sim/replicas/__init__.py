"""Histories of names with replicas: the product's own replicas over a simulated etcd, and whatever happens to them."""
