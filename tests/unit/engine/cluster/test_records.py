"""The records of a cluster's coordinator: they read back, and other versions are refused by name."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

import msgspec
import pytest
from hypothesis import given, strategies as st

from engine.coordinator.records import (
    DIRTY,
    EPOCHS,
    MEMBERS,
    Charge,
    ChargeRecord,
    DirtyRecord,
    EpochRecord,
    GenerationRecord,
    LakeRecord,
    MemberRecord,
    MemberState,
    OpeningRecord,
    Record,
    ShardsChargeRecord,
    ShardsRecord,
    WalkRecord,
    decode,
    dirty_key,
    encode,
    epoch_key,
    epoch_of_key,
    member_key,
    of_shards,
    partition_of_key,
)
from engine.format.coordinator import StateRecord, pack_entry, pack_lease, unpack_entry, unpack_lease, unpack_state
from lakefs.errors import StoreUnusable
from lakefs.ids import GcGeneration, LeaseId, MemberId, Partition, Revision, RingEpoch
from lakefs.limits import COORDINATOR_KEY_BYTES_MAX

MEMBER = MemberRecord(MemberId(b"m" * 16), ("10.0.0.1:7000", "/run/lake/m"), 1 << 40, ("sda", "host", "rack", "zone"))
KINDS: Final[list[type[Record]]] = [
    LakeRecord,
    MemberRecord,
    EpochRecord,
    GenerationRecord,
    DirtyRecord,
    WalkRecord,
    OpeningRecord,
]
EXAMPLES: list[tuple[Record, str]] = [
    (LakeRecord(b"l" * 16, 4, 2, "prod"), "9201" + "94c410" + "6c" * 16 + "0402" + "a470726f64"),
    (
        msgspec.structs.replace(MEMBER, state=MemberState.OUT),
        "9201" + "95c410" + "6d" * 16 + "92ad31302e302e302e313a37303030ab2f72756e2f6c616b652f6d"
        "cf0000010000000000" + "94a3736461a4686f7374a47261636ba47a6f6e65" + "a36f7574",
    ),
    (EpochRecord(RingEpoch(7)), "92019107"),
    (GenerationRecord(GcGeneration(300)), "920191cd012c"),
    (DirtyRecord(RingEpoch(7), is_moving=True, is_home=True), "92019307c3c3"),
    (WalkRecord(300, 12, 5, 6, 7, 8, 9, 10), "920198cd012c0c05060708090a"),
    (OpeningRecord(b"o" * 16, 300, is_old=True), "9201" + "93c410" + "6f" * 16 + "cd012cc3"),
]


@pytest.mark.parametrize(("record", "stored"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_record_has_these_bytes_and_reads_back(record: Record, stored: str) -> None:
    assert encode(record).hex() == stored
    assert decode(type(record), encode(record)) == record


def test_records_of_an_earlier_release_lack_their_last_fields() -> None:
    assert decode(DirtyRecord, bytes.fromhex("92019107")) == DirtyRecord(RingEpoch(7))
    assert decode(DirtyRecord, bytes.fromhex("92019207c3")) == DirtyRecord(RingEpoch(7), is_moving=True)
    unnamed = bytes.fromhex("9201" + "93c410" + "6c" * 16 + "0402")
    assert decode(LakeRecord, unnamed) == LakeRecord(b"l" * 16, 4, 2)


@pytest.mark.parametrize(("record", "stored"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_another_version_is_refused_by_name(record: Record, stored: str) -> None:
    later = bytes.fromhex(stored.replace("9201", "9202", 1))
    with pytest.raises(StoreUnusable, match=rf"{type(record).__name__} has version 2"):
        decode(type(record), later)


@pytest.mark.parametrize(("record", "stored"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_later_release_may_append_fields(record: Record, stored: str) -> None:
    version, fields = msgspec.msgpack.decode(bytes.fromhex(stored))
    assert decode(type(record), msgspec.msgpack.encode((version, [*fields, "more"]))) == record


@given(st.binary(max_size=60))
def test_odd_bytes_are_a_record_or_are_refused(value: bytes) -> None:
    for kind in KINDS:
        with suppress(StoreUnusable):
            assert isinstance(decode(kind, value), kind)


@given(st.lists(st.integers(0, 0xFFFF), min_size=2), st.lists(st.integers(1, 1 << 63), min_size=2))
def test_keys_sort_as_their_numbers_and_lie_in_their_range(partitions: list[int], epochs: list[int]) -> None:
    dirty = [dirty_key(Partition(number)) for number in sorted(partitions)]
    tables = [epoch_key(RingEpoch(number)) for number in sorted(epochs)]
    assert (dirty, tables) == (sorted(dirty), sorted(tables))
    assert [partition_of_key(key) for key in dirty] == sorted(partitions)
    assert [epoch_of_key(key) for key in tables] == sorted(epochs)
    for (begin, end), keys in ((DIRTY, dirty), (EPOCHS, tables), (MEMBERS, [member_key(MemberId(b"\xff" * 16))])):
        assert all(begin < key < end and len(key) <= COORDINATOR_KEY_BYTES_MAX for key in keys)


# --- records of the table --------------------------------------------------------------------------------


def test_records_of_the_table_read_back_and_other_versions_are_refused_by_name() -> None:
    state = StateRecord(Revision(5), LeaseId(3))
    assert unpack_state(state.pack()) == state
    assert unpack_state(None) == StateRecord(Revision(0), LeaseId(1))
    assert unpack_entry(pack_entry(Revision(5), LeaseId(3), b"value")) == (5, 3, b"value")
    assert unpack_lease(pack_lease(60)) == 60
    with pytest.raises(StoreUnusable, match="coordinator state version 2"):
        unpack_state(b"\2" + state.pack()[1:])
    with pytest.raises(StoreUnusable, match="coordinator entry head version 2"):
        unpack_entry(b"\2" + bytes(16))
    with pytest.raises(StoreUnusable, match="coordinator entry head of 16 bytes"):
        unpack_entry(bytes(16))
    with pytest.raises(StoreUnusable, match="coordinator lease of 6 bytes"):
        unpack_lease(pack_lease(60) + b"\0")


def test_a_charge_of_several_names_shards_is_refused_by_releases_that_know_of_one() -> None:
    charge = ChargeRecord(b"lake", Charge.SERVES, 3, b"incarnation", "there")
    later = of_shards(charge)
    assert decode(ChargeRecord, encode(charge)) == charge
    assert decode(ChargeRecord, encode(later)) == later
    assert type(decode(ChargeRecord, encode(later))) is ShardsChargeRecord
    assert type(msgspec.structs.replace(later, state=Charge.LEFT)) is ShardsChargeRecord
    version, fields = msgspec.msgpack.decode(encode(later))
    assert (version, fields) == (2, [b"lake", "moved", 3, b"incarnation", "there"])  # they take version 1 alone
    with pytest.raises(StoreUnusable, match="of a later release"):
        decode(ShardsRecord, encode(later))
