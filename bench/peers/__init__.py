"""Peers that the product is compared with: how each is installed, started and driven, in its own process.

Peers are no part of the product, and nothing of a peer is in this tree.
"""
