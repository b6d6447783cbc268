"""The keys that a cluster keeps with its coordinator, and the encoding of their values.

    lake                        LakeRecord        the lake's id and protection, chosen once
    members/ID                  MemberRecord      a member: where it is, how large, and its state; ID in hex
    epoch                       EpochRecord       the number of the newest ring epoch
    epochs/NUMBER               bytes             the table of a ring epoch that is not retired; 16 hex digits
    generation                  GenerationRecord  the present generation of gc
    gc                          bytes             the walk of the gc cycle under way; ends with its process
    dirty/PARTITION             DirtyRecord       a partition of which a stripe may be short; 4 hex digits
    walker                      bytes             the process that walks, with its lease
    walk                        WalkRecord        the position of the walk through all partitions
    openings/ID                 OpeningRecord     the last opening of a member's store; ID in hex
    names/SHARD/...             LogRecord, ...    the log of the names' groups (`engine.format.group_parts`)
    coordinator                 ChargeRecord      whether this coordinator is the lake's, or has been, or will be
    etcd                        EtcdRecord        where the lake's etcd is, for machines that join
    checkpoints[/SHARD]         CheckpointsRecord the checkpoints of a names shard that are content of the lake
    repeated                    RepeatedRecord    in a table of the names beside an etcd: when these keys were repeated
    names/SHARD/leader          LeaderRecord      the replica of a names shard that leads, on its lease
    settings                    SettingsRecord    what an operator has set for the whole lake
    shards                      ShardsRecord      the number of names shards; absent: one
    buckets/NAME                BucketShardRecord the names shard that a bucket is assigned to, or may be made in
    present/ID                  HeadRecord        a process that serves clients, on its lease; a random id, in hex

A value is a msgpack array that begins with its version; fields are appended, never moved.  An unknown version is
refused by name (StoreUnusable).  A ring epoch's table is bytes of another format, which has a version of its own.

Keys are ASCII and sort by their numbers.  No I/O: `engine.coordinator.lake_state` reads and changes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final, TypeVar, get_args

import msgspec

from engine.format.group_parts import FIRST_SHARD, LogKeys
from engine.format.records import decode_record
from lakefs.errors import StoreUnusable
from lakefs.ids import BlobId, GcGeneration, MemberId, NamesShard, Partition, RingEpoch, Sequence

LAKE_KEY: Final = b"lake"
EPOCH_KEY: Final = b"epoch"
GENERATION_KEY: Final = b"generation"
GC_KEY: Final = b"gc"
WALKER_KEY: Final = b"walker"
WALK_KEY: Final = b"walk"
MEMBERS: Final = b"members/", b"members0"
"""Begin and end of the keys of members."""
EPOCHS: Final = b"epochs/", b"epochs0"
"""Begin and end of the keys of ring epochs' tables."""
CHARGE_KEY: Final = b"coordinator"
ETCD_KEY: Final = b"etcd"
REPEATED_KEY: Final = b"repeated"
CHECKPOINTS_KEY: Final = b"checkpoints"
CHECKPOINTS: Final = CHECKPOINTS_KEY, CHECKPOINTS_KEY + b"0"
"""Begin and end of the keys of the names' checkpoints: of the first shard, and behind "/" of others."""
NAMES: Final = b"names/", b"names0"
"""Begin and end of the keys of the names themselves: who leads, and what their replicas share."""
LEADER_KEY: Final = LogKeys(FIRST_SHARD).leader
DIRTY: Final = b"dirty/", b"dirty0"
"""Begin and end of the keys of dirty partitions."""
OPENINGS: Final = b"openings/", b"openings0"
"""Begin and end of the keys of openings; behind those that every head follows."""
SETTINGS_KEY: Final = b"settings"
SHARDS_KEY: Final = b"shards"
BUCKETS: Final = b"buckets/", b"buckets0"
"""Begin and end of the keys of buckets."""
PRESENT: Final = b"present/", b"present0"
"""Begin and end of the keys of heads that are there."""
_VERSION: Final = 1
_SHARDS_VERSION: Final = 2
"""The version of a `ShardsChargeRecord`."""
_PARTITION_MAX: Final = 0xFFFF


class MemberState(StrEnum):
    """A member's part in the lake."""

    UP = "up"
    OUT = "out"
    """Silent for too long: its partitions go to others until it returns."""
    DRAINING = "draining"
    """Its shards are being moved to others."""
    REMOVED = "removed"
    """It holds nothing, and never returns."""


class LakeRecord(msgspec.Struct, frozen=True, array_like=True):
    """The lake: its id, the numbers of data and parity shards of a stripe, and the name that its operator gave it."""

    lake: bytes
    data_shards: int
    parity_shards: int
    name: str = ""


class MemberRecord(msgspec.Struct, frozen=True, array_like=True):
    """A member: addresses, room on its device, failure domains (device, machine, rack, zone), and state."""

    member: MemberId
    addresses: tuple[str, ...]
    room_bytes: int
    domains: tuple[str, ...]
    state: MemberState = MemberState.UP


def shared_devices(records: Iterable[MemberRecord]) -> dict[MemberId, str]:
    """Return a name of the device of each member that shares it with others: the first id of them, in hex.

    The names that members give their devices change with a restart of the machine; this one stays.
    """
    sharing: dict[tuple[str, ...], list[MemberId]] = {}
    for record in records:
        if any(record.domains[:1]):
            sharing.setdefault(record.domains[:2], []).append(record.member)
    return {member: min(members).hex() for members in sharing.values() if len(members) > 1 for member in members}


class EpochRecord(msgspec.Struct, frozen=True, array_like=True):
    """The newest ring epoch."""

    number: RingEpoch


class GenerationRecord(msgspec.Struct, frozen=True, array_like=True):
    """The present generation of gc."""

    number: GcGeneration


class DirtyRecord(msgspec.Struct, frozen=True, array_like=True):
    """A dirty partition: the ring epoch in which it was noted last.

    `is_moving`: as far as the last note knows, its stripes are whole, and have shards to be moved.
    `is_home`: a walk by that epoch's table found every shard at its home, and stripes of which too few shards are left.
    """

    epoch: RingEpoch
    is_moving: bool = False
    is_home: bool = False


class WalkRecord(msgspec.Struct, frozen=True, array_like=True):
    """The walk through all partitions: the next one, and when it began; -1: none is under way.

    `ended_ns` is the wall clock's at the end of the last whole walk, 0 before the first; `chunks` and `left` count what
    that walk saw, and the stripes that it could not make whole.
    """

    next_partition: int = -1
    partition_bits: int = 0
    began_ns: int = 0
    ended_ns: int = 0
    chunks: int = 0
    left: int = 0
    chunks_so_far: int = 0
    left_so_far: int = 0


class OpeningRecord(msgspec.Struct, frozen=True, array_like=True):
    """The opening of a member's store that was seen last, and the journal group up to which it was durable then.

    `is_old`: the member came back as it was earlier, and its shards have not all been compared since.
    """

    opening: bytes
    durable: int
    is_old: bool = False


class LogRecord(msgspec.Struct, frozen=True, array_like=True):
    """The log of a names shard: its lake, and the last group that was trimmed; 0: none."""

    lake: bytes
    trimmed: Sequence = Sequence(0)


class ReplicaRecord(msgspec.Struct, frozen=True, array_like=True):
    """A replica of a names shard: its machine, and the last group that is in its journal, synced.

    `said_ns`: the wall clock of its machine when it said so; `tail_bytes`: groups in the log, as far as it has seen
    them.  `is_removed`: its machine is gone for ever, and it does not come back.  `is_full`: its disk has no room for
    more names, or not for many.
    """

    machine: str
    kept: Sequence
    said_ns: int = 0
    tail_bytes: int = 0
    is_removed: bool = False
    is_full: bool = False


class Charge(StrEnum):
    """A coordinator's part while a lake moves from one to another (`engine.coordinator.moving`)."""

    MOVING = "being moved"
    """It is being filled, and is not in charge."""
    SERVES = "moved"
    """It is in charge."""
    LEAVING = "leaving"
    """It is in charge, and is copied to another one: nothing may be changed."""
    LEFT = "left"
    """Another one is in charge."""


class ChargeRecord(msgspec.Struct, frozen=True, array_like=True):
    """A coordinator's part in a lake.

    `turn` grows with each move; of two that are in charge the higher one is.  `incarnation` is drawn with each move.
    `place`: words that say where the one in charge is, when this one has left.
    """

    lake: bytes
    state: Charge
    turn: int
    incarnation: bytes
    place: str = ""

    @property
    def is_in_charge(self) -> bool:
        """True if the lake is this coordinator's, as far as it knows."""
        return self.state in (Charge.SERVES, Charge.LEAVING)


class ShardsChargeRecord(ChargeRecord, frozen=True, array_like=True):
    """The same of a lake whose names are in several shards.

    Its version is 2: releases that know of one shard only refuse the coordinator, and so lead no names there.  Their gc
    would free what the other shards name.
    """


class EtcdRecord(msgspec.Struct, frozen=True, array_like=True):
    """Where the etcd of a lake is: its URLs, the lake's name there, and which cluster and incarnation it is, in hex.

    `user`, and paths of files on the machine that wrote this: password, CA, certificate, key; empty: none.
    """

    endpoints: tuple[str, ...]
    name: str
    user: str = ""
    password_file: str = ""
    ca: str = ""
    certificate: str = ""
    key: str = ""
    cluster: str = ""
    incarnation: str = ""


class RepeatedReplica(msgspec.Struct, frozen=True, array_like=True):
    """A replica of the names as the leader knew it: its id, its machine's, and its last report (`ReplicaRecord`).

    `shard`: the names shard that it is a replica of.
    """

    replica: bytes
    machine: str
    kept: Sequence
    said_ns: int
    shard: NamesShard = NamesShard(0)


class RepeatedRecord(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's keys were repeated into a table of the names up to this time, by the leader's wall clock.

    `replicas`: those of all names shards that are not removed, as the leader knew them then.
    """

    said_ns: int
    replicas: tuple[RepeatedReplica, ...] = ()


class NamesCheckpoint(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint of the names that lies in the lake as a blob: its last group, its length, and its time."""

    blob: BlobId
    sequence: Sequence
    file_bytes: int
    said_ns: int


class CheckpointsRecord(msgspec.Struct, frozen=True, array_like=True):
    """The checkpoints of the names that are content of the lake, the newest first."""

    checkpoints: tuple[NamesCheckpoint, ...] = ()


class LeaderRecord(msgspec.Struct, frozen=True, array_like=True):
    """The replica of the names that leads: its id, its machine's, and the addresses at which it serves.

    An address `unix:` is of use on that machine alone.
    """

    replica: bytes
    machine: str
    addresses: tuple[str, ...]


class HeadRecord(msgspec.Struct, frozen=True, array_like=True):
    """A process that serves clients: its machine's id, the host's name, its process id, and its start by that clock.

    `has_members`: it keeps the members of its machine running, and they take shards while its lease lasts.
    """

    machine: str
    host: str
    pid: int
    since_ns: int
    has_members: bool = False


class SettingsRecord(msgspec.Struct, frozen=True, array_like=True):
    """Settings of the whole lake.

    `out_after_s`: silence after which a member is out.  `out_stops`: a level of failure domains, or "off": none is made
    out while more members are away than the largest domain of that level has.
    """

    out_after_s: int = 600
    out_stops: str = "rack"


class ShardsRecord(msgspec.Struct, frozen=True, array_like=True):
    """The names shards of the lake are those from 0 on, so many; their number never falls."""

    count: int = 1


class BucketShardRecord(msgspec.Struct, frozen=True, array_like=True):
    """The names shard that a bucket is assigned to: it is there, or may be made there and nowhere else."""

    shard: NamesShard


class _Versioned(msgspec.Struct, frozen=True, array_like=True):
    """The stored array: its version, and the record."""

    version: int
    record: msgspec.Raw


Record = (
    LakeRecord
    | MemberRecord
    | EpochRecord
    | GenerationRecord
    | DirtyRecord
    | WalkRecord
    | OpeningRecord
    | LogRecord
    | ReplicaRecord
    | ChargeRecord
    | ShardsChargeRecord
    | EtcdRecord
    | RepeatedRecord
    | CheckpointsRecord
    | LeaderRecord
    | HeadRecord
    | SettingsRecord
    | ShardsRecord
    | BucketShardRecord
)
R = TypeVar("R", bound=Record)
_encoder: Final = msgspec.msgpack.Encoder()
_versioned: Final = msgspec.msgpack.Decoder(_Versioned)
_decoders: Final[dict[type[msgspec.Struct], msgspec.msgpack.Decoder[Any]]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in get_args(Record)
}


def encode(record: Record) -> bytes:
    """Return the bytes of a record, with its version."""
    version = _SHARDS_VERSION if isinstance(record, ShardsChargeRecord) else _VERSION
    return _encoder.encode((version, record))


def decode(kind: type[R], value: bytes) -> R:
    """Return the record in a value.  StoreUnusable, naming its kind, for another version or shape."""
    what = f"the coordinator's {kind.__name__}"
    versioned = decode_record(_versioned, value, what)
    is_of_shards = kind is ChargeRecord and versioned.version == _SHARDS_VERSION
    if versioned.version != _VERSION and not is_of_shards:
        raise StoreUnusable(f"{what} has version {versioned.version}: it is of a later release")
    decoder: msgspec.msgpack.Decoder[R] = _decoders[ShardsChargeRecord if is_of_shards else kind]
    return decode_record(decoder, versioned.record, what)


def member_key(member: MemberId) -> bytes:
    """Key of a member."""
    return MEMBERS[0] + member.hex().encode()


def opening_key(member: MemberId) -> bytes:
    """Key of the last opening of a member's store."""
    return OPENINGS[0] + member.hex().encode()


def member_of_key(key: bytes) -> MemberId:
    """Return the member whose opening has a key."""
    return MemberId(bytes.fromhex(key.removeprefix(OPENINGS[0]).decode()))


def present_key(process: bytes) -> bytes:
    """Key of a head that is there."""
    return PRESENT[0] + process.hex().encode()


def epoch_key(epoch: RingEpoch) -> bytes:
    """Key of the table of a ring epoch."""
    return EPOCHS[0] + b"%016x" % epoch


def epoch_of_key(key: bytes) -> RingEpoch:
    """Number of the ring epoch, from the key of its table."""
    return RingEpoch(int(key.removeprefix(EPOCHS[0]), 16))


def dirty_key(partition: Partition) -> bytes:
    """Key of a dirty partition."""
    assert 0 <= partition <= _PARTITION_MAX, "a partition has 16 bits"
    return DIRTY[0] + b"%04x" % partition


def partition_of_key(key: bytes) -> Partition:
    """Number of the partition, from the key that notes it as dirty."""
    return Partition(int(key.removeprefix(DIRTY[0]), 16))


def bucket_key(bucket: str) -> bytes:
    """Key of a bucket."""
    return BUCKETS[0] + bucket.encode()


def bucket_of_key(key: bytes) -> str:
    """Return the bucket that has a key."""
    return key.removeprefix(BUCKETS[0]).decode()


def checkpoints_key(shard: NamesShard) -> bytes:
    """Key of the checkpoints of a names shard."""
    return CHECKPOINTS_KEY if shard == FIRST_SHARD else CHECKPOINTS_KEY + b"/%04x" % shard


def of_shards(charge: ChargeRecord) -> ShardsChargeRecord:
    """Return a charge as that of a lake whose names are in several shards."""
    return ShardsChargeRecord(charge.lake, charge.state, charge.turn, charge.incarnation, charge.place)
