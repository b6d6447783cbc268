"""One end of a link over a fabric (RDMA), as the two sides tell it to each other over the native connection."""

from __future__ import annotations

from typing import Final

from lakefs.errors import InvalidArgument
from lakefs.wire.base import Message

ROCE: Final = "roce"
INFINIBAND: Final = "infiniband"
IWARP: Final = "iwarp"
KINDS: Final = (ROCE, INFINIBAND, IWARP)

GID_BYTES: Final = 16
MTUS: Final = (256, 512, 1024, 2048, 4096)
READS_MAX: Final = 255
_QUEUE_PAIR_MAX: Final = (1 << 24) - 1
_FIRST_PACKET_MAX: Final = (1 << 24) - 1
_LID_MAX: Final = (1 << 16) - 1


class FabricEnd(Message, frozen=True):
    """Where a queue pair is, and what it agrees to.

    `kind`: "roce", "infiniband" or "iwarp"; both ends have the same.  `queue_pair`: its number, 24 bits.  `gid`: the
    address of its port, 16 bytes.  `lid`: the port's local number (InfiniBand), else 0.  `mtu_bytes`: the longest
    payload of a packet.  `first_packet`: the number of the first packet that it sends, 24 bits.  `reads_max`: READs
    that it answers at one time, and asks for.
    """

    kind: str
    queue_pair: int
    gid: bytes
    lid: int
    mtu_bytes: int
    first_packet: int
    reads_max: int


def check_end(end: FabricEnd) -> None:
    """Raise InvalidArgument unless each field of a foreign end is in its range: before any of it is used."""
    odd = (
        end.kind not in KINDS
        or not 0 < end.queue_pair <= _QUEUE_PAIR_MAX
        or len(end.gid) != GID_BYTES
        or not any(end.gid)
        or not 0 <= end.lid <= _LID_MAX
        or end.mtu_bytes not in MTUS
        or not 0 <= end.first_packet <= _FIRST_PACKET_MAX
        or not 0 <= end.reads_max <= READS_MAX
    )
    if odd:
        raise InvalidArgument(f"this is no end of a link over a fabric: {end}"[:400])
