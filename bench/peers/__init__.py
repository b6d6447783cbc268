"""What the product is held against: how a peer is had, started and driven, each in a process of its own.

None of it is a part of the product, and nothing of a peer is in this tree.
"""
