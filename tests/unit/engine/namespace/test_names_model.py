"""Names against a model: the tree must give the same answers as a plain dictionary of full keys for each bucket."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.format.layouts import NodeKind
from engine.namespace.binding import Binding, bind, bind_many
from engine.namespace.listing import list_names
from engine.namespace.names import copy, make_folder, rename, resolve
from engine.namespace.node_changes import make_symlink
from engine.namespace.removal import remove, remove_folder
from engine.namespace.tree import Resolved
from engine.tables.views import Transaction
from lakefs.errors import (
    AlreadyExists,
    FolderNotEmpty,
    InvalidArgument,
    InvalidName,
    KeyNotFound,
    NotAFolder,
    PreconditionFailed,
    UserError,
)
from lakefs.ids import EMPTY_BLOB, BlobId
from lakefs.wire.messages import NO_CONDITION, Condition
from tests.lengths import repeated
from tests.unit.support.nasty_keys import keys
from tests.unit.support.shelf import NOW_NS, PLAIN, Shelf, an_object, blob
from tests.unit.support.tree_check import check_tree


class NamesAgainstADictionary(RuleBasedStateMachine):
    """Two buckets; the model of each is a dictionary from full key to blob, or target; folders are prefixes of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf("b", "c")
        self.model: list[dict[str, BlobId]] = [{}, {}]
        self.texts = 0
        self.pool: list[str] = []

    @initialize(pool=st.lists(keys(), min_size=4, max_size=10, unique=True))
    def choose(self, pool: list[str]) -> None:
        """Choose keys from the pool, and their prefixes: few, so that they meet."""
        cuts = [k[: i + 1] for k in pool for i, c in enumerate(k) if c == "/"]
        self.pool = pool + cuts

    def key(self, index: int) -> str:
        return self.pool[index % len(self.pool)]

    def below(self, which: int, folder: str) -> list[str]:
        return [k for k in self.model[which] if k.startswith(folder) and k != folder]

    def is_object(self, which: int, key: str) -> bool:
        return key in self.model[which] and not key.endswith("/")

    def is_link(self, which: int, key: str) -> bool:
        return self.model[which].get(key, b"").startswith(b"to ")

    def attempt(self, error: type[UserError] | None, change: Callable[[Transaction], object]) -> None:
        if error is None:
            self.shelf.store.run(change)
        else:
            self.shelf.refuses(error, lambda: self.shelf.store.run(change))

    @rule(which=st.integers(0, 1), index=st.integers(0, 99), absent=st.booleans())
    def put(self, which: int, index: int, absent: bool) -> None:
        key, model = self.key(index), self.model[which]
        self.texts += 1
        node = an_object(str(self.texts))
        bucket = self.shelf.buckets[which]
        error = PreconditionFailed if absent and key in model else None
        self.attempt(error, lambda t: bind(t, bucket, key, node, Condition(absent=absent), NOW_NS))
        if error is None:
            model[key] = blob(str(self.texts))

    @rule(which=st.integers(0, 1), indexes=st.lists(st.integers(0, 99), max_size=6))
    def put_many(self, which: int, indexes: list[int]) -> None:
        bucket = self.shelf.buckets[which]
        items = [Binding(bucket, self.key(i), an_object(f"many{i}")) for i in indexes]
        results = self.shelf.store.run(lambda t: bind_many(t, items, NOW_NS))
        assert not any(isinstance(result, UserError) for result in results)
        self.model[which].update({self.key(i): blob(f"many{i}") for i in indexes})

    @rule(which=st.integers(0, 1), index=st.integers(0, 99), wrong=st.sampled_from([0, 0, 0, 1, -1]))
    def put_keeping_the_node(self, which: int, index: int, wrong: int) -> None:
        key, bucket = self.key(index), self.shelf.buckets[which]
        self.texts += 1
        present = resolve(self.shelf.store.view(), bucket, key)
        kept = (present.node_id if present else 9) + wrong
        binding = Binding(bucket, key, an_object(str(self.texts)), NO_CONDITION, kept)
        (result,) = self.shelf.store.run(lambda t: bind_many(t, [binding], NOW_NS))
        if wrong or present is None or present.kind is not NodeKind.OBJECT:
            assert isinstance(result, PreconditionFailed)
            return
        assert isinstance(result, Resolved)
        assert result.node_id == kept
        self.model[which][key] = blob(str(self.texts))

    @rule(which=st.integers(0, 1), index=st.integers(0, 99))
    def link(self, which: int, index: int) -> None:
        key, model, bucket = self.key(index), self.model[which], self.shelf.buckets[which]
        error: type[UserError] | None = None
        if key.endswith("/"):
            error = InvalidArgument
        elif key in model or key + "/" in model or self.below(which, key + "/"):
            error = AlreadyExists
        self.texts += 1
        target = b"to %d" % self.texts
        self.attempt(error, lambda t: make_symlink(t, bucket, key, target, PLAIN, NOW_NS))
        if error is None:
            model[key] = BlobId(target)

    def stays(self, which: int, gone: str, keep: bool) -> None:
        """Keep the folder of `gone` in the model, if that was asked for and nothing else keeps it."""
        folder = gone.removesuffix("/").rpartition("/")[0] + "/"
        if keep and "/" in gone.removesuffix("/") and not self.below(which, folder):
            self.model[which].setdefault(folder, EMPTY_BLOB)

    @rule(which=st.integers(0, 1), index=st.integers(0, 99), keep=st.booleans())
    def remove(self, which: int, index: int, keep: bool) -> None:
        key, bucket = self.key(index), self.shelf.buckets[which]
        removed = self.shelf.store.run(lambda t: remove(t, bucket, key, NO_CONDITION, NOW_NS, keep).found)
        assert content_of(removed) == self.model[which].pop(key, None)
        if removed is not None:
            self.stays(which, key, keep)

    @rule(which=st.integers(0, 1), index=st.integers(0, 99), keep=st.booleans())
    def remove_empty_folder(self, which: int, index: int, keep: bool) -> None:
        key, model, bucket = self.key(index), self.model[which], self.shelf.buckets[which]
        folder = key if key.endswith("/") else key + "/"
        error: type[UserError] | None = None
        if self.below(which, folder):
            error = FolderNotEmpty
        elif folder not in model:
            error = NotAFolder if self.is_object(which, folder[:-1]) else KeyNotFound
        self.attempt(error, lambda t: remove_folder(t, bucket, key, NO_CONDITION, NOW_NS, keep))
        if error is None:
            del model[folder]
            self.stays(which, folder, keep)

    @rule(which=st.integers(0, 1), index=st.integers(0, 99), exclusive=st.booleans())
    def make(self, which: int, index: int, exclusive: bool) -> None:
        key, model, bucket = self.key(index), self.model[which], self.shelf.buckets[which]
        folder = key if key.endswith("/") else key + "/"
        error: type[UserError] | None = None
        if len(folder.encode()) > 1024:
            error = InvalidName
        elif exclusive and (folder in model or self.is_object(which, folder[:-1]) or self.below(which, folder)):
            error = AlreadyExists
        self.attempt(error, lambda t: make_folder(t, bucket, key, exclusive, NOW_NS))
        if error is None:
            model.setdefault(folder, EMPTY_BLOB)

    @rule(
        which=st.integers(0, 1),
        index=st.integers(0, 99),
        to=st.integers(0, 1),
        to_index=st.integers(0, 99),
        replace=st.booleans(),
        keep=st.booleans(),
    )
    def move(self, which: int, index: int, to: int, to_index: int, replace: bool, keep: bool) -> None:
        key, to_key = self.key(index), self.key(to_index)
        source, target = self.shelf.buckets[which], self.shelf.buckets[to]
        error = self.refusal_of_move(which, key, to, to_key, replace)
        self.attempt(error, lambda t: rename(t, source, key, target, to_key, replace, NOW_NS, keep))
        if error is not None or (which, key) == (to, to_key):
            return
        moving = [key, *self.below(which, key)] if key.endswith("/") else [key]
        moved = {to_key + k[len(key) :]: self.model[which].pop(k) for k in moving if k in self.model[which]}
        self.model[to].pop(to_key, None)
        self.model[to].update(moved)
        self.stays(which, key, keep)

    def refusal_of_move(self, which: int, key: str, to: int, to_key: str, replace: bool) -> type[UserError] | None:
        is_folder = key.endswith("/")
        if is_folder != to_key.endswith("/"):
            return InvalidArgument
        if is_folder and which == to and to_key != key and to_key.startswith(key):
            return InvalidArgument
        if key not in self.model[which] and not (is_folder and self.below(which, key)):
            return KeyNotFound
        if (which, key) == (to, to_key):
            return None
        occupied = is_folder and bool(self.below(to, to_key))
        if not replace and (occupied or to_key in self.model[to]):
            return AlreadyExists
        return FolderNotEmpty if occupied else None

    @rule(which=st.integers(0, 1), index=st.integers(0, 99), to=st.integers(0, 1), to_index=st.integers(0, 99))
    def copy(self, which: int, index: int, to: int, to_index: int) -> None:
        key, to_key = self.key(index), self.key(to_index)
        source, target = self.shelf.buckets[which], self.shelf.buckets[to]
        error: type[UserError] | None = None if key in self.model[which] else KeyNotFound
        if self.is_link(which, key) and to_key.endswith("/"):
            error = InvalidArgument
        self.attempt(error, lambda t: copy(t, source, key, target, to_key, None, NO_CONDITION, NOW_NS))
        if error is None:
            self.model[to][to_key] = self.model[which][key]

    @invariant()
    def the_tree_is_sound_and_holds_the_keys_of_the_model(self) -> None:
        if len(self.shelf.buckets) < 2:
            return
        expected = sorted(f"{n}/{k}".encode() for n, m in zip("bc", self.model, strict=True) for k in m)
        assert sorted(check_tree(self.shelf.store.view())) == sorted([*expected, b"b/", b"c/"])
        for bucket, model in zip(self.shelf.buckets, self.model, strict=True):
            for key in self.pool:
                found = resolve(self.shelf.store.view(), bucket, key)
                assert content_of(found) == model.get(key)

    @rule(
        which=st.integers(0, 1),
        prefix=st.integers(0, 99),
        prefix_cut=st.integers(0, 12),
        after=st.integers(0, 99),
        after_end=st.sampled_from(["", "", "!", "0", "/", "\0", "é", "x" * 500, "cut"]),
        delimiter=st.sampled_from(["", "/"]),
        limit=st.integers(1, 6),
        folders=st.booleans(),
    )
    def list_pages(
        self,
        which: int,
        prefix: int,
        prefix_cut: int,
        after: int,
        after_end: str,
        delimiter: str,
        limit: int,
        folders: bool,
    ) -> None:
        start = self.key(prefix)[:prefix_cut] if prefix_cut < 12 else self.key(prefix)
        first = self.key(after)
        first = first[: len(first) // 2] if after_end == "cut" else first + after_end
        elements = modelled_listing(self.model[which], start, delimiter, folders)
        for behind in ("", first):
            expected = [e for e in elements if e.encode() > behind.encode()]
            view, bucket, listed = self.shelf.store.view(), self.shelf.buckets[which], []
            page, position = list_names(view, bucket, start, behind, delimiter, limit, folders)
            while True:
                listed += page
                if not position:
                    break
                assert len(page) == limit
                assert page[-1].key == position
                page, position = list_names(view, bucket, start, position, delimiter, limit, folders)
            assert [e.key for e in listed] == expected
            rolled = [e.key for e in listed if e.is_prefix]
            assert rolled == [e for e in expected if delimiter and "/" in e[len(start) :]]
            for entry in listed:
                if not entry.is_prefix:
                    is_link = self.is_link(which, entry.key)
                    assert entry.blob == (b"" if is_link else self.model[which].get(entry.key, b""))
                    assert (entry.kind == NodeKind.SYMLINK) == is_link


def content_of(found: Resolved | None) -> BlobId | None:
    """Return the blob of a node, or the target of a symlink instead."""
    if found is None or found.kind is not NodeKind.SYMLINK:
        return found.node.blob if found else None
    return BlobId(found.node.attributes.symlink_target)


def modelled_listing(model: dict[str, BlobId], prefix: str, delimiter: str, folders: bool) -> list[str]:
    """Return the elements of a listing, from the definition."""
    present = set(model)
    if folders:
        present |= {k[: i + 1] for k in model for i, c in enumerate(k) if c == "/"}
    elements = set()
    for key in present:
        if key.startswith(prefix):
            cut = key.find("/", len(prefix)) if delimiter else -1
            elements.add(key if cut < 0 else key[: cut + 1])
    return sorted(elements, key=str.encode)


TestNamesAgainstADictionary = NamesAgainstADictionary.TestCase
TestNamesAgainstADictionary.settings = settings(max_examples=repeated(30, 60), stateful_step_count=30, deadline=None)
