"""Messages about keyed blobs: values that are found by space and key; see `lakefs.wire.messages`.

A space is a named set of keys.  A key has 1 to KEYED_KEY_BYTES_MAX bytes; its value is written once and lies in 1 to
KEYED_PARTS_MAX chunks of data, the parts, which are committed together.  Requests name a space by its number, which
SpaceOpen answers and which is never used for another space.

Requests about keys answer each key by itself.  Lists of parts are flat: the parts of the first key, then those of the
second, and so on; `counts` has the number of parts of each key.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from lakefs.wire.base import Done, Failure, Message, Request
from lakefs.wire.fabric_messages import FabricMemory
from lakefs.wire.grants import ReadPiece

# Outcomes of one key of a request that changes.
KEYED_FAILED: Final = 0
"""Nothing was changed; `failures` says why."""
KEYED_STORED: Final = 1
"""The key has this value from now on."""
KEYED_PRESENT: Final = 2
"""The key has a value already, which stays."""
KEYED_REMOVED: Final = 3
"""The key had a value, which was removed."""
KEYED_ABSENT: Final = 4
"""The key had no value."""


# --- spaces ------------------------------------------------------------------------------------------


class SpaceStat(Message, frozen=True):
    """A space: its number, its settings, and its usage.  `quota_bytes` and `ttl_s`: 0 means none.

    `entries` and `value_bytes` are of the values that exist, expired ones too until they are removed.  `is_first`: true
    in the reply to the SpaceOpen that made the store use spaces, with which earlier releases do not open it.
    """

    name: str
    number: int
    created_ns: int
    quota_bytes: int
    ttl_s: int
    entries: int
    value_bytes: int
    is_first: bool = False


class SpaceOpen(Request, frozen=True):
    """Return the space of that name; make it when it does not exist, unless `create` is false (SpaceNotFound).

    `quota_bytes` and `ttl_s`, if given, become the space's; the quota is 0 or at least KEYED_QUOTA_BYTES_MIN.  The TTL
    counts for values stored from then on.  A name has 1 to SPACE_NAME_BYTES_MAX bytes and no control characters.
    InvalidArgument, also past SPACES_MAX spaces; InvalidName.
    """

    OP = 90
    REPLY = SpaceStat
    name: str
    quota_bytes: int | None = None
    ttl_s: int | None = None
    create: bool = True


class Spaces(Message, frozen=True):
    """All spaces, in byte order of their names.

    `version` grows with every change of them: of two answers the one with the greater version is later.  0: this one
    has none, because usage changed all the time.
    """

    spaces: list[SpaceStat]
    version: int = 0


class SpaceList(Request, frozen=True):
    """List all spaces, at most SPACES_MAX."""

    OP = 91
    REPLY = Spaces


class SpaceRemove(Request, frozen=True):
    """Remove a space with all its values.  SpaceNotFound.

    From the answer on its number is gone, and its name is free for a new space, with another number.
    """

    OP = 92
    REPLY = Done
    name: str


class SetSpaces(Request, frozen=True):
    """Have a member of a lake keep keys of exactly these spaces; durable when answered.

    `spaces` and `version` are those of the names' answer to SpaceList, with the member's share of each quota; usage is
    not read.  Spaces that are not listed are removed, and others made or changed.  A list of an earlier version than
    that which the member has changes nothing.  The answer has the member's spaces, with their usage, and the version
    that it has.  StaleEpoch; PermissionDenied unless the engine is a member; InvalidArgument, InvalidName; StoreFull.
    """

    OP = 108
    REPLY = Spaces
    epoch: int
    version: int
    spaces: list[SpaceStat]


# --- keys --------------------------------------------------------------------------------------------


class KeyedMatched(Message, frozen=True):
    """The value of each key: `counts` parts, 0 for a key without value; ids and lengths of all parts.

    `leases` has one for each part if the request asked for them.  `failures` is empty when no key failed.  The answer
    to a request for `presence` has a count of 1 for each key with a value, and no parts.
    """

    counts: list[int]
    chunks: list[bytes]
    lengths: list[int]
    leases: list[int] = []
    failures: list[Failure | None] = []

    def present(self, sizes: Sequence[int]) -> list[bool]:
        """Return for each key if it has a value, of that size if there are `sizes` (0: any), as a request asked.

        Also of an answer with parts, which an engine gives that does not know `presence`.
        """
        if not sizes or not self.chunks:
            return [count > 0 for count in self.counts]
        lengths = iter(self.lengths)
        totals = [sum(islice(lengths, count)) for count in self.counts]
        return [total > 0 and size in (0, total) for total, size in zip(totals, sizes, strict=True)]


class KeyedMatch(Request, frozen=True):
    """Find values: which of the keys have one, and of which chunks it consists.

    `lease`: keep the chunks until CloseLeases or the end of the connection, whatever becomes of the keys.  A value that
    has expired or is known to be damaged is not found.  SpaceNotFound; EngineBusy (leases).  A key fails by itself with
    InvalidArgument (its length), or RequestTooLarge, whether it has a value or not, when the values of the keys before
    it fill the answer: KEYED_PARTS_ANSWERED_MAX parts.
    `presence`: answer only which keys have a value; no key then fails for want of room.  `sizes`, if given, has for
    each key the length that its value has to have (0: any).  InvalidArgument with `lease`.
    """

    OP = 93
    REPLY = KeyedMatched
    space: int
    keys: list[bytes]
    lease: bool = False
    presence: bool = False
    sizes: list[int] = []


class KeyedLoaded(Message, frozen=True):
    """The loaded values: `counts` parts of each key, 0 where it failed; ids and lengths of all parts.

    `crcs`: of each part the CRC32Cs of its granules, 4 bytes each; empty when the request asked for no checksums.
    `failures` is empty when no key failed.
    """

    counts: list[int]
    chunks: list[bytes]
    lengths: list[int]
    crcs: list[bytes]
    failures: list[Failure | None] = []


class KeyedLoad(Request, frozen=True):
    """Write the value of each key to its offset in memory that was lent writable, its parts behind each other.

    As LoadSlots: `lengths`, if given, has the room of each value; the client checks the bytes, by ids or by the
    answer's checksums.  A key has a failure of its own: KeyNotFound, RequestTooLarge when the values before it fill the
    request (4,096 parts), and the failures of a slot.  SpaceNotFound; SessionLost when the memory is not, or no longer,
    lent on this connection.  `fabric` as in LoadSlots.
    """

    OP = 94
    REPLY = KeyedLoaded
    memory: int
    space: int
    keys: list[bytes]
    offsets: list[int]
    lengths: list[int] = []
    checksums: bool = True
    fabric: FabricMemory | None = None


class KeyedFound(Message, frozen=True):
    """Values that were found, and the bytes of their first parts: see `KeyedRead`.

    `counts`, `chunks`, `lengths` and `failures` as in KeyedMatched.  `pieces` are of the first parts of `chunks`, as in
    ReadChunksReply; their bytes follow each other in the body.
    """

    counts: list[int]
    chunks: list[bytes]
    lengths: list[int]
    pieces: list[ReadPiece]
    failures: list[Failure | None] = []


class KeyedRead(Request, frozen=True):
    """Find values at a member of a lake, and read their parts, the first ones that have `bytes_max` bytes together.

    A key fails by itself with InvalidArgument (its length), or RequestTooLarge when the values of the keys before it
    have 4,096 parts.  SpaceNotFound; PermissionDenied unless the engine is a member.
    """

    OP = 109
    REPLY = KeyedFound
    space: int
    keys: list[bytes]
    bytes_max: int


class KeyedOutcomes(Message, frozen=True):
    """The outcome of each key; `failures` is empty when no key failed."""

    outcomes: list[int]
    failures: list[Failure | None] = []


class KeyedPut(Request, frozen=True):
    """Store values under keys, each unless its key is present; durable when answered.  At most 16 MiB a request.

    `counts` has the number of parts of each value, `lengths` the bytes of each part (1 B to 4 MiB).  With `offsets`,
    one for each part, the parts are slots of lent `memory`; without, they follow each other in the body.  A present key
    is answered before anything of it is copied, and so is a key that the request has had before.  `depths`, if given,
    has the place of each key in its chain, 0 to 65,535: a space over its quota loses deeper ones first.  `resize`: a
    key whose value has another length than the new one counts as absent, and its value is replaced.

    `epoch`: the ring epoch by which a head takes this member for the keys' home; 0: none.  StaleEpoch, and nothing is
    stored, if the member has a newer one.

    SpaceNotFound; SessionLost (the memory); InvalidArgument and RequestTooLarge when the lists do not fit each other,
    or the body.  A key fails by itself: InvalidArgument, RequestTooLarge (over KEYED_VALUE_BYTES_MAX or the quota),
    SourceChanged (the memory was shrunk), EngineBusy (over the quota until others are evicted), StoreFull.
    """

    OP = 95
    REPLY = KeyedOutcomes
    space: int
    keys: list[bytes]
    counts: list[int]
    lengths: list[int]
    depths: list[int] = []
    memory: int = 0
    offsets: list[int] = []
    resize: bool = False
    epoch: int = 0


class KeyedCommit(Request, frozen=True):
    """Like KeyedPut, of chunks that the session holds: for values longer than one request may have.

    `chunks` has the ids of all parts; a key fails with ChunkNotFound when one of them is not in the store.
    SessionLost.
    """

    OP = 96
    REPLY = KeyedOutcomes
    session: bytes
    space: int
    keys: list[bytes]
    counts: list[int]
    chunks: list[bytes]
    depths: list[int] = []
    end_session: bool = False
    resize: bool = False
    epoch: int = 0


class KeyedIndexOpened(Message, frozen=True):
    """A read-only descriptor of the keyed index, sent with this frame.  It has room for `entries` keys."""

    entries: int


class OpenKeyedIndex(Request, frozen=True):
    """Get the keyed index: the table by which a client finds keys without a request.  See `docs/format.md`.

    PermissionDenied over TCP; UnsupportedVersion when this engine shares none.  A table whose magic has become
    zeros was replaced by a larger one: send this request again.
    """

    OP = 98
    REPLY = KeyedIndexOpened


class KeyHomesOpened(Message, frozen=True):
    """Read-only descriptors, sent with this frame: of the key homes, then of index and stamps of each home.

    `numbers`: of each of these homes, the number of its index in places.
    """

    numbers: list[int]


class OpenKeyHomes(Request, frozen=True):
    """Get the ring of keys of a lake, and the keyed indexes of the members on this machine.  See `docs/format.md`.

    Only a head answers it.  PermissionDenied over TCP; UnsupportedVersion when no member is on this machine.  When the
    magic of the key homes or of an index has become zeros, or a member's stamps say that it ended, send this request
    again.  OpenSegments at a head opens a segment of such a place.
    """

    OP = 99
    REPLY = KeyHomesOpened


class KeyedRemove(Request, frozen=True):
    """Remove the values of keys; durable when answered.  SpaceNotFound; InvalidArgument for a key by itself.

    The keys are removed in their order, and with very many parts in several steps: others may see some removed and some
    not, and an error may come after the first are.  `epoch`: as in KeyedPut.
    """

    OP = 97
    REPLY = KeyedOutcomes
    space: int
    keys: list[bytes]
    epoch: int = 0
