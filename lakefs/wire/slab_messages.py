"""Messages about the engine's DRAM tier, whose memory clients on the same machine read directly."""

from __future__ import annotations

from lakefs.wire.base import Done, Message, Request


class SlabsOpened(Message, frozen=True):
    """Slabs whose read-only descriptors arrive with this frame, in order, then the descriptor of the generations.

    Missing slabs are left out.  `slab_bytes` is the length of each; 0, and no descriptor: the engine has no tier.
    """

    slabs: list[int]
    slab_bytes: int


class OpenSlabs(Request, frozen=True):
    """Get descriptors of slabs, at most 63 a request; on the Unix socket only.  See `lakefs.grants.dram_slabs`."""

    OP = 48
    REPLY = SlabsOpened
    slabs: list[int]


class NoteReads(Request, frozen=True):
    """Report chunks that the client read without a Locate, at most 4,096: the tier keeps chunks that are read often."""

    OP = 57
    REPLY = Done
    chunks: list[bytes]
