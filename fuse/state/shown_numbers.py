"""Numbers of inodes that are not their node's, and `st_ino` of nodes that are shown by such a number.

A file that was made here has shown a number of its own before the store gave it a node.  When others write it anew,
each content is another inode here, and the kernel forgets them in any order: the number stays until it has forgotten
all.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Protocol

_OWN_NUMBERS: Final = 1 << 62
"""Above all node numbers.  For files not stored yet, and for nodes whose number is in use."""


class ShownNumber:
    """The number that a node is shown by, and the inodes that show it."""

    __slots__ = ("number", "shown_by")

    def __init__(self, number: int) -> None:
        self.number = number
        self.shown_by: set[Hashable] = set()


class Numbered(Hashable, Protocol):
    """An inode, for the code here."""

    node: int
    shown: ShownNumber | None


class ShownNumbers:
    """The numbers by which nodes are shown, where those are not the nodes' own."""

    def __init__(self) -> None:
        self._by_node: dict[int, ShownNumber] = {}
        self._last_own = _OWN_NUMBERS

    def __len__(self) -> int:
        return len(self._by_node)

    def own(self) -> int:
        """Return a number that no node has, nor another inode."""
        self._last_own += 1
        return self._last_own

    def of(self, node: int) -> ShownNumber | None:
        """Return the number by which a node is shown; None if no inode that is known shows another than the node's."""
        return self._by_node.get(node)

    def give(self, inode: Numbered, node: int, shown: ShownNumber) -> None:
        """Give an inode a node, another or none (0), and the number by which that is shown from now on."""
        self.leave(inode.node, inode.shown, inode)
        inode.node, inode.shown = node, shown
        if node:
            shown.shown_by.add(inode)
            self._by_node[node] = shown

    def leave(self, node: int, shown: ShownNumber | None, inode: Hashable) -> None:
        """Note that `inode`, which shows a node by a number, is forgotten, or has another node now."""
        if shown is not None:
            shown.shown_by.discard(inode)
            if not shown.shown_by:
                self.end(node, shown)

    def end(self, node: int, shown: ShownNumber | None) -> None:
        """Show the node's next content by another number, if it is shown by this one."""
        if shown is not None and self._by_node.get(node) is shown:
            del self._by_node[node]
