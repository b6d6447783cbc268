"""Buckets: made, found, listed and removed."""

from __future__ import annotations

import pytest

from engine.format.layouts import Table
from engine.namespace import buckets as buckets_module
from engine.namespace.buckets import (
    create_bucket,
    ensure_bucket,
    find_bucket,
    initialise,
    list_buckets,
    remove_bucket,
    to_bucket_stat,
)
from engine.namespace.tree import NameEvent
from lakefs.errors import AlreadyExists, BucketNotEmpty, BucketNotFound, InvalidArgument, InvalidName, StoreUnusable
from lakefs.wire.messages import BucketStat
from tests.old_buckets import OLD_NAMES, any_new_name
from tests.unit.support.memory_view import MemoryStore
from tests.unit.support.shelf import Shelf
from tests.unit.support.tree_check import check_tree


def new_store() -> MemoryStore:
    store = MemoryStore()
    store.run(initialise)
    return store


def test_a_new_store_has_a_root_and_no_buckets() -> None:
    store = new_store()
    assert list_buckets(store.view()) == []
    assert check_tree(store.view()) == []
    before = store.dump()
    store.run(initialise)
    assert store.dump() == before


def test_a_bucket_that_was_made_is_found_by_its_name() -> None:
    store = new_store()
    made = store.run(lambda txn: create_bucket(txn, "models", 7))
    assert find_bucket(store.view(), "models") == made
    assert to_bucket_stat(made) == BucketStat("models", 7, made.node)
    assert check_tree(store.view()) == [b"models/"]


def test_buckets_are_listed_in_byte_order_of_their_names() -> None:
    store = new_store()
    names = ["b", "a-b", "a", "A", "a.c", "a_d", "a0"]
    with any_new_name():
        for name in names:
            store.run(lambda txn, name=name: create_bucket(txn, name, 1))  # type: ignore[misc]
    assert [bucket.name for bucket in list_buckets(store.view())] == sorted(names)


def test_a_bucket_is_made_once() -> None:
    store = new_store()
    made = store.run(lambda txn: create_bucket(txn, "models", 7))
    with pytest.raises(AlreadyExists, match="'models' exists already"):
        store.run(lambda txn: create_bucket(txn, "models", 8))
    assert store.run(lambda txn: ensure_bucket(txn, "models", 9)) == made


def test_a_missing_bucket_is_named_with_the_command_that_makes_it() -> None:
    store = new_store()
    with pytest.raises(BucketNotFound, match=r"'models' does not exist.*create_bucket"):
        find_bucket(store.view(), "models")
    with pytest.raises(BucketNotFound):
        store.run(lambda txn: remove_bucket(txn, "models"))


@pytest.mark.parametrize("name", ["", "a/b", "x" * 600, "a\0"])
def test_a_name_that_no_bucket_can_have_is_refused_everywhere(name: str) -> None:
    store = new_store()
    with pytest.raises(InvalidName):
        find_bucket(store.view(), name)
    with pytest.raises(InvalidName):
        store.run(lambda txn: create_bucket(txn, name, 1))
    with pytest.raises(InvalidName):
        store.run(lambda txn: ensure_bucket(txn, name, 1))
    with pytest.raises(InvalidName):
        store.run(lambda txn: remove_bucket(txn, name))


@pytest.mark.parametrize("name", OLD_NAMES)
def test_a_new_bucket_keeps_s3s_rules_and_one_that_exists_need_not(name: str) -> None:
    store = new_store()
    with any_new_name():
        made = store.run(lambda txn: create_bucket(txn, name, 7))
    assert find_bucket(store.view(), name) == store.run(lambda txn: ensure_bucket(txn, name, 9)) == made
    with pytest.raises(AlreadyExists):
        store.run(lambda txn: create_bucket(txn, name, 8))
    store.run(lambda txn: remove_bucket(txn, name))
    before = store.dump()
    for make in (create_bucket, ensure_bucket):
        with pytest.raises(InvalidName, match="for example: my-models"):
            store.run(lambda txn, make=make: make(txn, name, 1))  # type: ignore[misc]
    with pytest.raises(BucketNotFound, match=r"does not exist; a new one cannot have that name: .*my-models"):
        find_bucket(store.view(), name)
    assert store.dump() == before


def test_only_an_empty_bucket_is_removed_and_leaves_nothing() -> None:
    shelf = Shelf("kept")
    before = shelf.store.dump()
    made = shelf.store.run(lambda txn: create_bucket(txn, "models", 7))
    shelf.buckets = [made]
    shelf.put("a/b")
    with pytest.raises(BucketNotEmpty, match=r'remove_tree\("models"\)'):
        shelf.store.run(lambda txn: remove_bucket(txn, "models"))
    shelf.remove("a/b")
    shelf.store.notes.clear()
    shelf.store.run(lambda txn: remove_bucket(txn, "models"))
    assert shelf.store.dump() == before
    assert [note for _, note in shelf.store.notes] == [NameEvent("delete", "models", "", made.node)]


def test_there_is_a_most_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets_module, "BUCKETS_MAX", 2)
    store = new_store()
    store.run(lambda txn: create_bucket(txn, "one", 1))
    store.run(lambda txn: ensure_bucket(txn, "two", 1))
    with pytest.raises(InvalidArgument, match="2 already"):
        store.run(lambda txn: create_bucket(txn, "three", 1))
    store.run(lambda txn: remove_bucket(txn, "one"))
    store.run(lambda txn: create_bucket(txn, "three", 1))


def test_a_bucket_record_of_the_future_is_refused_by_its_version() -> None:
    store = new_store()
    store.run(lambda txn: create_bucket(txn, "models", 7))
    ((key, value),) = store.tables[Table.BUCKETS].items()
    store.tables[Table.BUCKETS][key] = value[:1] + b"\x02" + value[2:]
    with pytest.raises(StoreUnusable, match="version 2"):
        find_bucket(store.view(), "models")
