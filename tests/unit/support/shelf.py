"""A store in memory with buckets, and the functions of `engine.namespace.names` called in transactions of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from engine.format.layouts import Node
from engine.namespace.binding import Binding, bind, bind_many
from engine.namespace.buckets import BucketRef, create_bucket, initialise
from engine.namespace.names import copy, make_folder, rename, resolve
from engine.namespace.object_stat import new_object
from engine.namespace.removal import remove, remove_folder
from engine.namespace.tree import NameEvent, Resolved
from lakefs.errors import UserError
from lakefs.ids import BlobId, blob_of, data_chunk_id
from lakefs.wire.messages import NO_CONDITION, Condition, ObjectAttributes
from tests.old_buckets import any_new_name
from tests.unit.support.memory_view import MemoryStore
from tests.unit.support.tree_check import check_tree

NOW_NS = 1_700_000_000_000_000_000
PLAIN = ObjectAttributes()


def blob(text: str) -> BlobId:
    """Return the blob of a text, as one chunk."""
    return blob_of(data_chunk_id(text.encode()))


def an_object(text: str = "x") -> Node:
    """Return the record of an object that holds the text."""
    return new_object(blob(text), len(text), 1, PLAIN, NOW_NS)


class Shelf:
    """Buckets, `b` unless named; every method is one transaction."""

    def __init__(self, *buckets: str) -> None:
        self.store = MemoryStore()
        self.store.run(initialise)
        with any_new_name():  # short names read well here
            self.buckets = [self._made(name) for name in buckets or ("b",)]
        self.store.notes.clear()

    def _made(self, name: str) -> BucketRef:
        return self.store.run(lambda txn: create_bucket(txn, name, NOW_NS))

    @property
    def bucket(self) -> BucketRef:
        return self.buckets[0]

    def put(self, key: str, text: str = "x", condition: Condition = NO_CONDITION) -> Resolved:
        return self.store.run(lambda txn: bind(txn, self.bucket, key, an_object(text), condition, NOW_NS))

    def put_all(self, keys: Iterable[str]) -> None:
        bindings = [Binding(self.bucket, key, an_object()) for key in keys]
        results = self.store.run(lambda txn: bind_many(txn, bindings, NOW_NS))
        assert not any(isinstance(result, UserError) for result in results)

    def remove(self, key: str, condition: Condition = NO_CONDITION) -> Resolved | None:
        return self.store.run(lambda txn: remove(txn, self.bucket, key, condition, NOW_NS).found)

    def remove_folder(self, key: str) -> Resolved:
        return self.store.run(lambda txn: remove_folder(txn, self.bucket, key, NO_CONDITION, NOW_NS))

    def make_folder(self, key: str, exclusive: bool = False) -> Resolved:
        return self.store.run(lambda txn: make_folder(txn, self.bucket, key, exclusive, NOW_NS))

    def move(self, key: str, to_key: str, replace: bool = True, to: BucketRef | None = None) -> Resolved:
        target = to or self.bucket
        return self.store.run(lambda txn: rename(txn, self.bucket, key, target, to_key, replace, NOW_NS))

    def copy(
        self, key: str, to_key: str, attributes: ObjectAttributes | None = None, condition: Condition = NO_CONDITION
    ) -> Resolved:
        return self.store.run(
            lambda txn: copy(txn, self.bucket, key, self.bucket, to_key, attributes, condition, NOW_NS + 1)
        )

    def get(self, key: str) -> Resolved | None:
        return resolve(self.store.view(), self.bucket, key)

    def all_keys(self) -> list[str]:
        """Return all keys of all buckets, with the bucket in front when there are several; checks the tree."""
        found = [key.decode() for key in check_tree(self.store.view())]
        bare = [key for key in found if key.partition("/")[2]]
        return bare if len(self.buckets) > 1 else [key.partition("/")[2] for key in bare]

    def events(self) -> list[tuple[Any, ...]]:
        notes = [note for _, note in self.store.notes]
        return [(n.kind, n.key, n.to_key) if n.to_key else (n.kind, n.key) for n in notes if isinstance(n, NameEvent)]

    def refuses(self, error: type[Exception], change: Callable[..., object], *args: object) -> str:
        """Make a change that must be refused before it changes anything; return the message of the refusal."""
        before, notes = self.store.dump(), len(self.store.notes)
        run = self.store.run

        def run_and_look(decide: Callable[[Any], Any]) -> Any:
            def looked(txn: Any) -> Any:
                try:
                    return decide(txn)
                finally:
                    assert txn.mutations == 0, "a refused change had begun"

            return run(looked)

        self.store.run = run_and_look  # type: ignore[method-assign]
        try:
            with pytest.raises(error) as refusal:
                change(*args)
        finally:
            self.store.run = run  # type: ignore[method-assign]
        assert self.store.dump() == before
        assert len(self.store.notes) == notes
        return str(refusal.value)
