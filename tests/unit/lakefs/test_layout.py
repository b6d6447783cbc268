"""Layouts: little-endian, without padding, each name declared once."""

from __future__ import annotations

import pytest

from lakefs import layout
from lakefs.layout import Layout


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep layouts that are declared here out of the registry: the documents must have all that are in it."""
    monkeypatch.setattr(layout, "_REGISTRY", {})


def test_fields_lie_one_behind_the_other_without_padding() -> None:
    record = Layout("sample", 15, [("kind", "B"), ("count", "Q"), ("tag", "2s"), ("crc", "I")])
    assert [(field.name, field.code, field.offset, field.size) for field in record.fields] == [
        ("kind", "B", 0, 1),
        ("count", "Q", 1, 8),
        ("tag", "2s", 9, 2),
        ("crc", "I", 11, 4),
    ]
    assert record.offset_of("tag") == 9


def test_integers_are_little_endian() -> None:
    record = Layout("sample", 3, [("kind", "B"), ("count", "H")])
    assert record.pack(1, 2) == b"\x01\x02\x00"


def test_what_was_packed_is_unpacked_by_name_and_from_an_offset() -> None:
    record = Layout("sample", 6, [("tag", "2s"), ("count", "I")])
    packed = record.pack(b"ab", 7)
    assert record.unpack_fields(memoryview(packed)) == {"tag": b"ab", "count": 7}
    assert record.unpack_from(b"..." + packed, 3) == (b"ab", 7)
    room = bytearray(8)
    record.pack_into(room, 2, b"ab", 7)
    assert bytes(room) == b"\0\0" + packed


def test_a_declared_size_that_is_not_the_sum_of_the_fields_fails_at_import() -> None:
    with pytest.raises(AssertionError, match="3 bytes declared as 4"):
        Layout("sample", 4, [("kind", "B"), ("count", "H")])


def test_a_name_is_declared_once() -> None:
    first = Layout("sample", 1, [("kind", "B")])
    with pytest.raises(AssertionError, match="twice"):
        Layout("sample", 1, [("kind", "B")])
    assert layout.registered() == {"sample": first}


def test_an_unknown_field_has_no_offset() -> None:
    with pytest.raises(KeyError, match="colour"):
        Layout("sample", 1, [("kind", "B")]).offset_of("colour")


def test_changing_the_list_of_layouts_does_not_change_the_registry() -> None:
    Layout("sample", 1, [("kind", "B")])
    layout.registered().clear()
    assert list(layout.registered()) == ["sample"]
