"""Versions against a model of S3's: puts, deletes, moves and lists must give the same answers in both."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.format.layouts import NodeKind
from engine.namespace.binding import Binding, bind, bind_many
from engine.namespace.buckets import BucketRef, find_bucket, set_bucket
from engine.namespace.listing import list_names, list_versions
from engine.namespace.names import copy, rename, require, resolve
from engine.namespace.removal import remove, remove_version
from engine.namespace.tree import Resolved
from engine.namespace.versions import version_id
from lakefs.errors import FolderNotEmpty, KeyDeleted, KeyNotFound, PreconditionFailed, VersionIsMarker, VersionNotFound
from lakefs.wire.messages import NO_CONDITION, BucketSet, Condition, ListVersions, VersionEntry
from tests.lengths import repeated
from tests.unit.support.shelf import NOW_NS, Shelf, an_object, blob
from tests.unit.support.tree_check import check_tree
from tests.unit.support.version_model import NULL, UNKNOWN, Version, VersionModel

SEEDS = repeated(80, 200)
STEPS = 60
_LONG = "x" * 469
POOLS = (
    ("a", "b"),
    ("f/x", "g/x", "f/", "g/"),
    ("f/x", "g/x", "h/x", "f/", "g/", "h/"),
    ("a", "a/", "a/b", "a/c/", "a/c/d", "b/", "b/b", "a!"),
    (_LONG + "y", _LONG + "yz", _LONG + "ya", _LONG + "y/b", _LONG + "y/b/c", _LONG + "y/"),
    ("f/x", "f/y", "g/x", "f/", "g/", "h", "\U0001f642/é", "n" * 1000),
)
"""A few keys each, so that they meet; some agree in as many bytes as the table keeps of a key."""
WEIGHTS = {
    "set_versioning": 5,
    "put": 20,
    "put_if_absent": 3,
    "put_keeping_the_node": 6,
    "delete": 12,
    "delete_one_version": 14,
    "look_for_what_is_gone": 2,
    "copy_a_version": 5,
    "move": 6,
    "move_folder": 5,
    "list_pages": 6,
}


class VersionsAgainstAModel:
    """One bucket, whose versioning changes as S3 allows."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.shelf = Shelf("b")
        self.model = VersionModel()
        self.texts = 0
        self.pool = rng.choice(POOLS)
        self.gone: list[tuple[str, str]] = []

    def step(self) -> None:
        """Make one change or read, and check what must hold at any time."""
        rng = self.rng
        (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        if kind == "set_versioning":
            self.set_versioning(rng.choice(("enabled", "enabled", "suspended")))
        elif kind == "list_pages":
            self.list_pages(self.key(), rng.randrange(14), rng.choice(("", "/")), rng.randint(1, 4), self.key())
        elif kind == "move_folder":
            folders = [key for key in self.pool if key.endswith("/")] or [self.key()]
            self.move_folder(rng.choice(folders), rng.choice(folders))
        elif kind in ("move", "copy_a_version"):
            getattr(self, kind)(self.key(), self.key())
        elif kind != "look_for_what_is_gone":
            getattr(self, kind)(self.key())
        elif self.gone:
            self.look_for_what_is_gone(*rng.choice(self.gone))
        self.every_version_is_listed_and_found()
        self.names_are_what_keys_are_bound_to()

    def key(self) -> str:
        return self.rng.choice(self.pool)

    def bucket(self) -> BucketRef:
        return find_bucket(self.shelf.store.view(), "b")

    def text(self) -> str:
        self.texts += 1
        return str(self.texts)

    def id_of(self, found: Resolved) -> str:
        return version_id(self.bucket(), found.node)

    def set_versioning(self, versioning: str) -> None:
        self.shelf.store.run(lambda t: set_bucket(t, BucketSet("b", versioning=versioning)))
        self.model.versioning = versioning

    def put(self, key: str) -> None:
        text = self.text()
        bound = self.shelf.store.run(lambda t: bind(t, self.bucket(), key, an_object(text), NO_CONDITION, NOW_NS))
        self.model.put(key, text, self.id_of(bound))

    def put_if_absent(self, key: str) -> None:
        text = self.text()
        absent = Binding(self.bucket(), key, an_object(text), Condition(absent=True))
        (result,) = self.shelf.store.run(lambda t: bind_many(t, [absent], NOW_NS))
        if self.model.of(key).bound is None:
            assert isinstance(result, Resolved)
            self.model.put(key, text, self.id_of(result))
        else:
            assert isinstance(result, PreconditionFailed)

    def put_keeping_the_node(self, key: str) -> None:
        bound, same = self.model.of(key).bound, self.rng.random() < 0.3
        present = resolve(self.shelf.store.view(), self.bucket(), key)
        if bound is None or present is None or present.kind is not NodeKind.OBJECT:
            return
        text = str(bound.text) if same else self.text()
        binding = Binding(self.bucket(), key, an_object(text), NO_CONDITION, present.node_id)
        (result,) = self.shelf.store.run(lambda t: bind_many(t, [binding], NOW_NS))
        assert isinstance(result, Resolved)
        assert result.node_id == present.node_id
        if same:
            assert self.id_of(result) == self.id_of(present)
        else:
            self.model.put(key, text, self.id_of(result))

    def delete(self, key: str) -> None:
        removal = self.shelf.store.run(lambda t: remove(t, self.bucket(), key, NO_CONDITION, NOW_NS))
        bound = self.model.of(key).bound
        assert (removal.found is None) == (bound is None)
        assert bool(removal.marker) == (bool(self.model.versioning) and not key.endswith("/"))
        self.model.delete(key, removal.marker)

    def delete_one_version(self, key: str) -> None:
        versions = self.model.of(key).all
        chosen = self.rng.choice(versions).id if versions else "%016x" % (1 << 40)
        removed = self.shelf.store.run(lambda t: remove_version(t, self.bucket(), key, chosen, NOW_NS))
        assert (removed is None) == (not versions)
        self.model.delete_version(key, chosen)
        if chosen != NULL:
            self.gone.append((key, chosen))

    def look_for_what_is_gone(self, key: str, version: str) -> None:
        with pytest.raises(VersionNotFound):
            require(self.shelf.store.view(), self.bucket(), key, version)

    def copy_a_version(self, key: str, to_key: str) -> None:
        versions = self.model.of(key).all
        if not versions:
            return
        chosen, bucket = self.rng.choice(versions), self.bucket()
        run = self.shelf.store.run
        args = (bucket, key, bucket, to_key, None, NO_CONDITION, NOW_NS, None, chosen.id)
        if chosen.text is None:
            self.shelf.refuses(VersionIsMarker, lambda: run(lambda t: copy(t, *args)))
            return
        made = run(lambda t: copy(t, *args))
        self.model.put(to_key, chosen.text, self.id_of(made))

    def move(self, key: str, to_key: str) -> None:
        bucket = self.bucket()
        if key.endswith("/") or to_key.endswith("/") or self.model.of(key).bound is None:
            return
        moved = self.shelf.store.run(lambda t: rename(t, bucket, key, bucket, to_key, True, NOW_NS))
        self.model.move(key, to_key, self.id_of(moved))

    def move_folder(self, key: str, to_key: str) -> None:
        bucket = self.bucket()
        bound = [name for name, found in self.model.keys.items() if found.bound]
        below = [name for name in bound if name.startswith(key)]
        if not (key.endswith("/") and to_key.endswith("/")) or to_key.startswith(key) or not below:
            return
        run = self.shelf.store.run
        if any(name.startswith(to_key) and name != to_key for name in bound):
            self.shelf.refuses(
                FolderNotEmpty, lambda: run(lambda t: rename(t, bucket, key, bucket, to_key, True, NOW_NS))
            )
            return
        run(lambda t: rename(t, bucket, key, bucket, to_key, True, NOW_NS))
        self.model.keys.pop(to_key, None)
        self.model.move_folder(key, to_key)

    def every_version_is_listed_and_found(self) -> None:
        listed = self.listed(ListVersions("b"))
        expected = [
            (key, version) for key in sorted(self.model.keys, key=str.encode) for version in self.model.keys[key].all
        ]
        assert [entry.key for entry in listed] == [key for key, _ in expected]
        for entry, (key, version) in zip(listed, expected, strict=True):
            self.compare(entry, version)
            found = self.model.keys[key]
            newest = found.all[0]
            assert entry.is_latest == (version.order == newest.order and (found.bound is not None or found.is_deleted))

    def compare(self, entry: VersionEntry, version: Version) -> None:
        if version.id == UNKNOWN:
            version = self.learn(entry, version)
        assert (entry.version, entry.is_marker) == (version.id, version.text is None)
        view, bucket = self.shelf.store.view(), self.bucket()
        found = require(view, bucket, entry.key, entry.version).node
        assert found.is_marker == (version.text is None)
        assert version.text is None or found.blob == blob(version.text)

    def learn(self, entry: VersionEntry, version: Version) -> Version:
        assert len(entry.version) == 16
        assert (entry.key, entry.version) not in self.gone
        old = self.model.keys[entry.key].old
        (place,) = (place for place, one in enumerate(old) if one.order == version.order)
        if old[place].id == NULL:
            old[place] = dataclasses.replace(old[place], by_order=entry.version)
        else:
            old[place] = dataclasses.replace(old[place], id=entry.version)
        return dataclasses.replace(version, id=entry.version)

    def names_are_what_keys_are_bound_to(self) -> None:
        bound = {key: found.bound for key, found in self.model.keys.items() if found.bound}
        view, bucket = self.shelf.store.view(), self.bucket()
        names, _ = list_names(view, bucket)
        assert [entry.key for entry in names] == sorted(bound, key=str.encode)
        assert all(entry.blob == blob(str(bound[entry.key].text)) for entry in names)
        for key, found in self.model.keys.items():
            if found.bound is None and not key.endswith("/"):
                with pytest.raises(KeyNotFound) as refusal:
                    require(view, bucket, key)
                assert isinstance(refusal.value, KeyDeleted) == found.is_deleted
        check_tree(view)

    def list_pages(self, prefix: str, cut: int, delimiter: str, limit: int, first: str) -> None:
        start = prefix[:cut] if cut < 12 else prefix
        everything = self.listed(ListVersions("b", start, delimiter=delimiter))
        assert [(e.key, e.version) for e in everything] == self.modelled(start, delimiter)
        for behind in ("", first):
            expected = [e for e in everything if e.key.encode() > behind.encode()]
            request = ListVersions("b", start, behind, delimiter=delimiter, limit=limit)
            assert self.listed(request) == expected

    def modelled(self, prefix: str, delimiter: str) -> list[tuple[str, str]]:
        elements: list[tuple[str, str]] = []
        for key in sorted(self.model.keys, key=str.encode):
            if not key.startswith(prefix):
                continue
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            if end < 0:
                elements += [(key, version.id) for version in self.model.keys[key].all]
            elif self.model.keys[key].all and (key[: end + 1], "") not in elements:
                elements.append((key[: end + 1], ""))
        return elements

    def listed(self, request: ListVersions) -> list[VersionEntry]:
        """Return all pages of a list."""
        found: list[VersionEntry] = []
        view, bucket = self.shelf.store.view(), self.bucket()
        after, version = request.after, ""
        while True:
            page = list_versions(
                view, bucket, ListVersions("b", request.prefix, after, version, request.delimiter, request.limit)
            )
            found += page.entries
            after, version = page.next_after, page.next_version
            if not after:
                return found
            assert len(page.entries) == request.limit


@pytest.mark.parametrize("first_seed", range(0, SEEDS, SEEDS // 4))
def test_the_store_is_not_told_from_the_model(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS // 4):
        run = VersionsAgainstAModel(random.Random(seed))
        for count in range(STEPS):
            try:
                run.step()
            except BaseException as error:
                error.add_note(f"seed {seed}, step {count}")
                raise


def test_a_null_version_beside_another_one_is_known_by_its_order() -> None:
    run = VersionsAgainstAModel(random.Random(1))
    run.put("f/x")
    run.put("g/x")
    run.put("z")
    run.set_versioning("enabled")
    run.delete("g/x")
    run.move_folder("f/", "g/")
    pages = [
        [(entry.key, entry.version) for entry in run.listed(ListVersions("b", limit=limit))] for limit in (1, 2, 1000)
    ]
    assert pages[0] == pages[1] == pages[2]
    bound, marker, old = [version for key, version in pages[0] if key == "g/x"]
    assert bound == NULL
    assert len({bound, marker, old}) == 3
    run.every_version_is_listed_and_found()
    run.model.delete_version("g/x", NULL)
    run.shelf.store.run(lambda t: remove_version(t, run.bucket(), "g/x", NULL, NOW_NS))
    run.every_version_is_listed_and_found()
    view = run.shelf.store.view()
    assert require(view, run.bucket(), "g/x", old).node_id == require(view, run.bucket(), "g/x", NULL).node_id
    assert run.shelf.store.run(lambda t: remove_version(t, run.bucket(), "g/x", marker, NOW_NS))
    assert run.shelf.store.run(lambda t: remove_version(t, run.bucket(), "g/x", old, NOW_NS))
    assert [entry.key for entry in run.listed(ListVersions("b"))] == ["z"]
