"""Keys of the table `names`: what is accepted, and that order and identity of keys are kept."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from engine.namespace.keys import (
    behind,
    check_bucket_name,
    check_key,
    is_folder_step,
    lookup_path,
    name_key,
    range_end,
    split_key,
    split_path,
)
from lakefs.errors import InvalidName
from lakefs.ids import NodeId
from lakefs.limits import COMPONENT_SPLIT_BYTES, KEY_BYTES_MAX
from tests.unit.support.nasty_keys import keys


def table_order(path: bytes) -> tuple[bytes, ...]:
    """Return the names on a depth-first walk's way to a key; a folder's own blob precedes its children."""
    steps, name = split_key(path)
    return (*steps, name)


@given(keys())
def test_a_split_key_joins_to_the_same_key(key: str) -> None:
    path = check_key(key)
    steps, name = split_key(path)
    assert b"".join(steps) + name == path


@given(keys())
def test_every_step_fits_a_key_of_the_index(key: str) -> None:
    path = check_key(key)
    steps, name = split_key(path)
    for step in steps:
        assert len(name_key(NodeId(2**64 - 2), step)) <= 489
        if not is_folder_step(step):
            assert len(step) == COMPONENT_SPLIT_BYTES
            assert b"/" not in step
    assert len(behind(name_key(NodeId(2**64 - 2), name))) <= 489
    assert (b"/" in name) == path.endswith(b"/")


@given(st.lists(keys(), min_size=2, max_size=12, unique=True))
def test_order_of_the_table_is_byte_order_of_the_keys(many: list[str]) -> None:
    paths = [check_key(key) for key in many]
    assert sorted(paths, key=table_order) == sorted(paths)


@given(st.lists(keys(), min_size=2, max_size=12, unique=True))
def test_different_keys_have_different_steps(many: list[str]) -> None:
    assert len({table_order(check_key(key)) for key in many}) == len(many)


@given(keys(), st.integers(0, KEY_BYTES_MAX))
def test_names_with_a_prefix_are_those_of_its_range(key: str, cut: int) -> None:
    path = check_key(key)
    steps, rest = split_path(path[:cut])
    inner, name = split_key(path)
    assert inner[: len(steps)] == steps or [*inner, name] == steps
    following = [*inner, name][len(steps) :]
    parent = NodeId(7)
    for first in following[:1]:
        assert name_key(parent, rest) <= name_key(parent, first) < range_end(parent, rest)


def test_a_component_of_480_bytes_is_split_and_one_of_479_is_not() -> None:
    assert split_key(b"x" * 479) == ([], b"x" * 479)
    assert split_key(b"x" * 480) == ([b"x" * 480], b"")
    assert split_key(b"x" * 480 + b"/") == ([b"x" * 480], b"/")
    assert split_key(b"x" * 961 + b"/b") == ([b"x" * 480, b"x" * 480, b"x/"], b"b")


def test_empty_parts_and_dots_are_ordinary_components() -> None:
    assert split_key(b"a//b") == ([b"a/", b"/"], b"b")
    assert split_key(b"/") == ([], b"/")
    assert split_key(b"./../x") == ([b"./", b"../"], b"x")


@pytest.mark.parametrize("key", ["k", "k" * 4095, "é" * 2047, "a//b/", " ", "\x01"])
def test_keys_that_a_path_can_say_are_accepted(key: str) -> None:
    assert check_key(key).decode() == key


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "0 bytes in UTF-8; a key has 1 to 4095"),
        ("k" * 4096, "4096 bytes in UTF-8; a key has 1 to 4095"),
        ("é" * 2048, "4096 bytes in UTF-8; a key has 1 to 4095"),
        ("a\0b", "NUL"),
        ("a\ud800", "lone surrogate"),
    ],
)
def test_other_keys_are_refused_with_the_reason(key: str, reason: str) -> None:
    with pytest.raises(InvalidName, match=reason) as refusal:
        check_key(key)
    refusal.value.message.encode()
    refusal.value.subject.encode()
    assert len(refusal.value.message) < 700


@given(st.text(st.characters(codec=None), max_size=30))
def test_what_is_looked_up_is_never_refused(text: str) -> None:
    path = lookup_path(text)
    assert 0xFF not in path
    split_path(path)


@pytest.mark.parametrize("name", ["models", "a", "My_Models", "a.b-c", "x" * 63, "0", "2026-11"])
def test_buckets_are_looked_up_by_every_name_that_a_store_can_hold(name: str) -> None:
    assert check_bucket_name(name) == name.encode()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "3 to 63"),
        ("x" * 64, "64 characters"),
        ("a/b", "letters, digits"),
        ("-ab", "begin and end"),
        ("ab.", "begin and end"),
        ("a..b", "two dots"),
        (".", "3 to 63"),
        ("a b", "letters, digits"),
        ("modèles", "letters, digits"),
        ("ab\n", "letters, digits"),
        ("٣٣٣", "letters, digits"),
        ("ab\ud800", "letters, digits"),
        ("10.0.0.1", "IP address"),
    ],
)
def test_a_bucket_name_that_no_store_can_hold_is_refused_with_the_rule(name: str, reason: str) -> None:
    with pytest.raises(InvalidName, match=reason) as refusal:
        check_bucket_name(name)
    refusal.value.message.encode()
