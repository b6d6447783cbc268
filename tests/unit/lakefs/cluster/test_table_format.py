"""Bytes of a table: what is packed is unpacked, and nothing else is."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from lakefs.cluster.members import Member, Standing
from lakefs.cluster.placing import first_table, next_table
from lakefs.cluster.protection import PROTECTIONS, Protection
from lakefs.cluster.table import NO_MEMBER, Table
from lakefs.cluster.table_format import RING_TABLE_HEADER, RING_TABLE_MEMBER, pack, unpack
from lakefs.errors import ProtocolError, UnsupportedVersion
from lakefs.host.crc import crc32c
from lakefs.ids import RingEpoch
from tests.unit.lakefs.cluster.fleets import P42, TB, fleet, member_id, small_tables, with_state


@pytest.fixture(scope="module")
def table() -> Table:
    members = [
        Member(
            member_id(number),
            TB + number,
            f"höst-{number // 2}",
            f"rack-{number // 4}",
            "zone",
            device="disk" if number in (4, 5) else "",
        )
        for number in range(9)
    ]
    with_out = next_table(first_table(P42, members), with_state(members, Standing.OUT, 3))
    return replace(with_out, ring_epoch=RingEpoch((1 << 64) - 1))


@pytest.fixture(scope="module")
def packed(table: Table) -> bytes:
    return pack(table)


def resealed(packed: bytes) -> bytes:
    """Return the bytes with the checksum that they should have: damage that the checksum does not show."""
    body = crc32c(packed[64:], crc32c(packed[:60]))
    return packed[:60] + struct.pack("<I", body) + packed[64:]


def changed(packed: bytes, offset: int, value: bytes) -> bytes:
    return resealed(packed[:offset] + value + packed[offset + len(value) :])


def test_a_table_is_what_was_packed(table: Table, packed: bytes) -> None:
    assert unpack(packed) == table
    assert unpack(bytearray(packed)) == unpack(memoryview(packed)) == table
    assert pack(unpack(packed)) == packed


@settings(max_examples=10)
@given(st.sampled_from(PROTECTIONS), st.integers(1, 12), st.booleans())
def test_tables_of_every_protection_come_back(protection: Protection, count: int, racked: bool) -> None:
    with small_tables():
        one = first_table(protection, fleet(count, 2, 1 if racked else 0), accept_loss=True)
        assert unpack(pack(one)) == one


def test_16384_rows_at_4_2_take_256_kib() -> None:
    rows = ((0,) * 6 + (NO_MEMBER,) * 2,) * 16384
    one = Table(RingEpoch(1), P42, (Member(member_id(0), TB),), rows, 14, 1)
    assert len(pack(one)) == 256 * 1024 + RING_TABLE_HEADER.size + RING_TABLE_MEMBER.size + 1
    assert unpack(pack(one)) == one


@settings(max_examples=300)
@given(st.data())
def test_one_changed_byte_is_noticed(packed: bytes, data: st.DataObject) -> None:
    at = data.draw(st.one_of(st.integers(0, 900), st.integers(0, len(packed) - 1)))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != packed[at]))
    with pytest.raises((ProtocolError, UnsupportedVersion)):
        unpack(packed[:at] + bytes([value]) + packed[at + 1 :])


def test_bytes_that_end_early_or_go_on_are_refused(packed: bytes) -> None:
    for length in (0, 1, 63, 64, 65, 300, 600, len(packed) - 1):
        with pytest.raises(ProtocolError):
            unpack(packed[:length])
    with pytest.raises(ProtocolError):
        unpack(packed + b"\0")


def test_a_version_that_is_not_known_is_named(packed: bytes) -> None:
    with pytest.raises(UnsupportedVersion, match="version 2"):
        unpack(changed(packed, 8, struct.pack("<H", 2)))


HEADER = {field.name: field.offset for field in RING_TABLE_HEADER.fields}
MEMBER = {field.name: 64 + field.offset for field in RING_TABLE_MEMBER.fields}
NAMES = 64 + 9 * 44


@pytest.mark.parametrize(
    ("offset", "value", "why"),
    [
        (HEADER["magic"], b"LAKEKING", "begins with"),
        (HEADER["data_shards"], b"\x05\x01", "5.1"),
        (HEADER["data_shards"], b"\x00\x06", "0.6"),
        (HEADER["partition_bits"], b"\x0d", "2.13 rows"),
        (HEADER["partition_bits"], b"\xff", "2.255 rows"),
        (HEADER["reserved"], b"\x01", "impossible value"),
        (HEADER["ring_epoch"], bytes(8), "impossible value"),
        (HEADER["vnode_room_bytes"], bytes(8), "impossible value"),
        (HEADER["member_count"], bytes(4), "0 members"),
        (HEADER["member_count"], b"\xff" * 4, "4294967295 members"),
        (HEADER["member_count"], b"\xff\xff\0\0", "not what its header says"),
        (HEADER["names_bytes"], b"\xff" * 4, "not what its header says"),
        (HEADER["name_count"], b"\xff" * 4, "names of domains"),
        (MEMBER["id"], b"\xff" * 16, "order of their ids"),
        (MEMBER["room_bytes"], bytes(8), "has room for"),
        (MEMBER["room_bytes"], b"\xff" * 8, "has room for"),
        (MEMBER["machine"], b"\xff" * 4, "impossible value"),
        (MEMBER["zone"], bytes(4), "is in rack"),
        (MEMBER["state"], b"\x00", "impossible value"),
        (MEMBER["state"], b"\x02", "gets no places"),
        (MEMBER["reserved"], b"\x01", "impossible value"),
        (NAMES, b"\x01", "ends behind the names"),
        (NAMES + 1, b"\xff", "ends behind the names"),
        (NAMES + 3, b"\xff", "not UTF-8"),
        (NAMES + 2, b"z", "names of domains"),
        (-2, b"\x09\x00", "gets no places"),
        (-16, b"\xff\xff", "gets no places"),
        (-16, b"\x09\x00", "gets no places"),
    ],
)
def test_values_that_no_table_has_are_refused_though_the_checksum_is_right(
    packed: bytes, offset: int, value: bytes, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        unpack(changed(packed, offset % len(packed), value))


def test_a_name_that_no_member_uses_is_refused(table: Table) -> None:
    one = replace(table, members=tuple(replace(member, machine="", rack="r", zone="") for member in table.members))
    packed = pack(one)
    rack = 64 + RING_TABLE_MEMBER.offset_of("rack")
    for number in range(9):
        packed = changed(packed, rack + 44 * number, bytes(4))
    with pytest.raises(ProtocolError, match="no member is in"):
        unpack(packed)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_order(junk: bytes) -> None:
    for start in (b"", b"LAKERING\x01\x00\x04\x02\x0c"):
        with pytest.raises((ProtocolError, UnsupportedVersion)):
            unpack(start + junk)
        with pytest.raises((ProtocolError, UnsupportedVersion)):
            unpack(resealed((start + junk).ljust(64, b"\0")))


def test_small_tables_are_not_packed_tables() -> None:
    with small_tables(6):
        one = first_table(P42, fleet(6))
    with pytest.raises(ProtocolError, match=r"2\^6 rows"):
        unpack(pack(one))
