"""Messages about shards: what heads of a lake ask of its members.  Only an engine that is a member answers them.

A shard is named by its chunk's id and a number from 0 to SHARD_NUMBER_MAX.  Lists of one request go together: the first
chunk, shard number and length are those of the first shard.  `chunk_lengths` has the length of each shard's chunk, as
it was sent with the shard.  See `lakefs.wire.messages`.
"""

from __future__ import annotations

from typing import Final

from lakefs.wire.base import Done, Message, Request

SHARD_NUMBER_MAX: Final = 254
"""Largest number of a shard: the key of a record has a byte for it, and 255 is the whole chunk."""
GENERATION_MAX: Final = (1 << 63) - 2
EPOCH_MAX: Final = (1 << 63) - 1
TOUCHED_UNKNOWN: Final = GENERATION_MAX + 1
"""Answered as `touched` by a member that does not know the gc generation: maybe touched by any session."""
LIST_SHARDS_MAX: Final = 16_384
"""Shards of one answer to ListShards, at most 63 bytes each: 1,008 KiB of the 4 MiB of a frame."""
EPOCH_TABLE_BYTES_MAX: Final = 1 << 20
"""Table of an epoch: 16,384 rows of 16 members of 4 bytes."""
GC_BATCHES_MAX: Final = 1 << 24
"""GcMark requests of one walk, of 4,096 chunks each: 64 billion chunks; the set of their numbers takes 2 MiB."""
HOMES_BYTES_MAX: Final = 8192
"""Ring partitions in GcSweep, a bit each: 65,536, by the first 16 bits of a digest."""


class EpochKnown(Message, frozen=True):
    """The member's ring epoch, durable, and its table; an empty table if the member started again since it got one.

    `opening` names this opening of its store; empty: the member does not say.  The store was `recovered` up to that
    journal group, and is `durable` up to this one.  `takes`: it takes shards, offers and marks now; False: its lease
    was not renewed.
    """

    epoch: int
    table: bytes
    opening: bytes = b""
    recovered: int = 0
    durable: int = 0
    takes: bool = True


class SetEpoch(Request, frozen=True):
    """Take a newer ring epoch and its table; durable when answered.  Another epoch than a newer one changes nothing.

    So epoch 0 asks for the member's.  InvalidArgument for another table of the same epoch.
    `generation`: the coordinator's gc generation, read after this connection was made; 0: not read.  The member counts
    all that was touched before it started as touched in that one.  Without it, gc frees no shard there.
    `without_table`: the answer has no table, which takes 64 KiB.
    """

    OP = 100
    REPLY = EpochKnown
    epoch: int
    table: bytes = b""
    generation: int = 0
    without_table: bool = False


class ShardsStored(Message, frozen=True):
    """For each shard, in order: True if it was new.  All are durable, and touched in the request's generation."""

    fresh: list[bool]


class StoreShards(Request, frozen=True):
    """Store shards, each 1 B to 4 MiB, each named once; durable when answered, and touched in that gc generation.

    With `offsets`, one for each shard, they are slots of lent `memory`; without, they follow each other in the body.
    `crcs`: of each shard the CRC32Cs of its granules, 4 bytes each.  They are compared with the bytes; if some differ,
    nothing of the request is stored (InvalidArgument).  A shard cannot be compared with its chunk's id.
    A chunk has up to 4 MiB, no shard is longer than its chunk, and one of a chunk of a granule is as long as that.
    A present shard stays as it is.  AlreadyExists, and nothing is stored, if it has other bytes than the new one, or
    another length of its chunk.

    StaleEpoch; CoordinatorLost (the member's lease was not renewed); SessionLost (the memory); StoreFull;
    InvalidArgument and RequestTooLarge when the lists do not fit each other, or the body.
    """

    OP = 101
    REPLY = ShardsStored
    epoch: int
    generation: int
    chunks: list[bytes]
    shards: list[int]
    lengths: list[int]
    crcs: list[bytes]
    memory: int = 0
    offsets: list[int] = []
    chunk_lengths: list[int] = []
    """Not to be left out, though it is behind fields that may be."""


class ShardsOffered(Message, frozen=True):
    """Lengths of each offered shard and of its chunk, in order; 0 for one that is absent, or known to be damaged."""

    lengths: list[int]
    chunk_lengths: list[int]


class OfferShards(Request, frozen=True):
    """Ask which shards are present; those are durable when answered, and touched in that gc generation.  StaleEpoch."""

    OP = 102
    REPLY = ShardsOffered
    epoch: int
    generation: int
    chunks: list[bytes]
    shards: list[int]


class ShardsListed(Message, frozen=True):
    """A page of shards, by chunk and number: lengths, checksums of their records, and generations (see ListShards).

    `next_after` is empty on the last page.  `damaged_chunks` and `damaged_shards` name, in the same order, the shards
    of the page's range that are known to be damaged; an earlier member names none.  They are in no other list, so who
    does not know these fields counts them as absent.
    """

    chunks: list[bytes]
    shards: list[int]
    lengths: list[int]
    crcs: list[int]
    touched: list[int]
    next_after: bytes = b""
    chunk_lengths: list[int] = []
    damaged_chunks: list[bytes] = []
    damaged_shards: list[int] = []


class ListShards(Request, frozen=True):
    """List shards whose chunks' digests are at least `begin` and below `end` (first bytes of them; b"": no bound).

    Chunks of data are listed first, then manifests, each by digest; shards of a chunk by number.  `after` is
    `next_after` of the page before.  At most `limit`, and at most LIST_SHARDS_MAX, damaged ones included: a page may
    have no others.  `touched` of each: it was last stored or offered in that gc generation, or an earlier one.  A page
    is no instant: a shard that is stored or dropped meanwhile may be in it or not.
    `only_damaged`: list no others.  An earlier member ignores it.
    """

    OP = 103
    REPLY = ShardsListed
    begin: bytes = b""
    end: bytes = b""
    after: bytes = b""
    limit: int = LIST_SHARDS_MAX
    only_damaged: bool = False


class ShardsDropped(Message, frozen=True):
    """For each shard, in order: 0 if the member has it no more, else the generation for which it was kept."""

    touched: list[int]


class DropShards(Request, frozen=True):
    """Drop shards that have a copy elsewhere, damaged ones too; durable when answered.

    `touched`: the gc generation with which each copy was stored.  A shard that was touched in a later one is kept: the
    copy is touched anew first.  StaleEpoch.
    `only_damaged`: keep those that are not known to be damaged.  An earlier member ignores it, and has named none.
    """

    OP = 104
    REPLY = ShardsDropped
    epoch: int
    chunks: list[bytes]
    shards: list[int]
    touched: list[int]
    only_damaged: bool = False


class GcBegin(Request, frozen=True):
    """Begin a cycle of gc of shards: remember which shards exist, and mark none.

    `generation` is the cycle's.  `walk`: 16 random bytes of the walk through the names, whose marks follow.  The same
    walk again changes nothing; another walk ends the cycle before.  InvalidArgument for an earlier generation.
    """

    OP = 105
    REPLY = Done
    generation: int
    walk: bytes


class GcMark(Request, frozen=True):
    """Mark all shards of chunks.  `batch`: number of the request, from 0; one that was received changes nothing.

    PreconditionFailed when the member has no marks of this walk: it started again, or another walk began.
    """

    OP = 106
    REPLY = Done
    walk: bytes
    batch: int
    chunks: list[bytes]


class ShardsSwept(Message, frozen=True):
    """The freed shards and their bytes, durable; `kept_because`: the reason why none was, empty if the sweep was
    done."""

    freed_shards: int
    freed_bytes: int
    kept_because: str = ""


class GcSweep(Request, frozen=True):
    """End a walk's cycle: free shards born before its beginning, not marked, and not touched in the last generations.

    `batches`: how many GcMark the walk has sent here; unless all were received, nothing is freed.  `homes`: a bit for
    each ring partition, of which the member is a home in every epoch that is not retired; in others nothing is freed.
    Partition n, the first bits of a digest, is bit n % 8 of byte n / 8; there are 8 to 65,536, a power of two.
    PreconditionFailed as in GcMark; EngineBusy while it is swept already.
    """

    OP = 107
    REPLY = ShardsSwept
    walk: bytes
    batches: int
    homes: bytes
