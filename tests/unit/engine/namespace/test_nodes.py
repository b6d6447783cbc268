"""Decisions about nodes: which are kept, what is changed in place, and the events about that."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.format.layouts import Node, NodeKind, Table, node_key
from engine.namespace.binding import Binding, bind, bind_many
from engine.namespace.names import make_folder, rename
from engine.namespace.node_changes import make_symlink, set_attributes
from engine.namespace.object_stat import new_object, to_list_entry, to_object_stat
from engine.namespace.removal import remove, remove_folder
from engine.namespace.tree import NameEvent, Resolved
from engine.tables.views import Transaction
from lakefs.errors import AlreadyExists, InvalidArgument, KeyNotFound, PreconditionFailed, RequestTooLarge
from lakefs.ids import EMPTY_BLOB, NodeId
from lakefs.limits import ATTRIBUTES_BYTES_MAX
from lakefs.wire.messages import NO_CONDITION, Condition, ObjectAttributes, SetAttributes
from tests.store_rig import client_of, fsck, put, run, simulated_store, tamper
from tests.unit.support.shelf import NOW_NS, PLAIN, Shelf, an_object, blob

LATER_NS = NOW_NS + 1000


def keep(shelf: Shelf, key: str, node_id: int, node: Node) -> Resolved | Exception:
    """Put over a node."""
    binding = Binding(shelf.bucket, key, node, keep_node=node_id)
    (result,) = shelf.store.run(lambda txn: bind_many(txn, [binding], NOW_NS))
    return result


def link(shelf: Shelf, key: str, target: bytes = b"target", attributes: ObjectAttributes = PLAIN) -> Resolved:
    return shelf.store.run(lambda txn: make_symlink(txn, shelf.bucket, key, target, attributes, NOW_NS))


def change(
    shelf: Shelf,
    key: str,
    *,
    mode: int | None = None,
    mtime_ns: int | None = None,
    atime_ns: int | None = None,
    xattrs: Mapping[str, bytes | None] | None = None,
) -> Resolved:
    request = SetAttributes("b", key, mode=mode, mtime_ns=mtime_ns, atime_ns=atime_ns, xattrs=dict(xattrs or {}))
    return shelf.store.run(lambda txn: set_attributes(txn, shelf.bucket, request, LATER_NS))


def test_a_kept_node_changes_its_record_and_nothing_else() -> None:
    shelf = Shelf()
    first = shelf.put("dir/a", "one")
    names = dict(shelf.store.tables[Table.NAMES])
    second = keep(shelf, "dir/a", first.node_id, new_object(blob("two"), 3, 1, PLAIN, LATER_NS))
    assert isinstance(second, Resolved)
    assert second.node_id == first.node_id
    assert shelf.get("dir/a") == second
    assert dict(shelf.store.tables[Table.NAMES]) == names
    assert shelf.store.last_node == first.node_id
    assert shelf.store.notes[-1][1] == NameEvent("put", "b", "dir/a", first.node_id, blob=blob("two"))
    assert shelf.all_keys() == ["dir/a"]


def test_a_refused_kept_put_leaves_the_others_of_its_batch_whole() -> None:
    shelf = Shelf()
    first = shelf.put("a", "one")
    bindings = [
        Binding(shelf.bucket, "new/b", an_object("b")),
        Binding(shelf.bucket, "new/parents/c", an_object("c"), keep_node=first.node_id),
        Binding(shelf.bucket, "a", an_object("two"), keep_node=first.node_id),
        Binding(shelf.bucket, "a", an_object("three")),
        Binding(shelf.bucket, "a", an_object("four"), keep_node=first.node_id),
    ]
    results = shelf.store.run(lambda txn: bind_many(txn, bindings, NOW_NS))
    assert [isinstance(result, PreconditionFailed) for result in results] == [False, True, False, False, True]
    assert shelf.all_keys() == ["a", "new/b"]
    found = shelf.get("a")
    assert found is not None
    assert found.node.blob == blob("three")


def test_a_symlink_is_a_node_without_blob_that_a_put_replaces() -> None:
    shelf = Shelf()
    made = link(shelf, "f/l", b"../somewhere", ObjectAttributes(mode=0o777, mtime_ns=5, content_type="no/such"))
    assert made.node.mtime_ns == 5
    assert made.node.ctime_ns == NOW_NS
    stat = to_object_stat("b", "f/l", made.node_id, made.node)
    assert (stat.kind, stat.symlink_target, stat.size_bytes, stat.blob) == (3, b"../somewhere", 12, b"")
    assert (stat.etag, stat.chunk_count, stat.content_type) == ("", 0, "")
    entry = to_list_entry("f/l", made.node_id, made.node)
    assert (entry.kind, entry.size_bytes, entry.ctime_ns) == (3, 12, NOW_NS)
    shelf.refuses(PreconditionFailed, shelf.put, "f/l", "x", Condition(absent=True))
    shelf.refuses(AlreadyExists, link, shelf, "f/l")
    shelf.refuses(AlreadyExists, link, shelf, "f")
    shelf.refuses(InvalidArgument, link, shelf, "f/m/")
    put_over = shelf.put("f/l", "x")
    assert (put_over.kind, put_over.node.attributes.symlink_target) == (NodeKind.OBJECT, b"")
    assert put_over.node_id != made.node_id
    assert shelf.all_keys() == ["f/l"]
    assert shelf.events() == [("put", "f/"), ("put", "f/l"), ("put", "f/l")]


def test_a_copied_symlink_is_a_symlink_of_its_own() -> None:
    shelf = Shelf()
    made = link(shelf, "l", attributes=ObjectAttributes(xattrs={"user.a": b"1"}))
    copied = shelf.copy("l", "dir/l2")
    assert copied.node_id != made.node_id
    assert copied.node.attributes == made.node.attributes
    other = shelf.copy("l", "l3", ObjectAttributes(uid=7))
    assert (other.node.uid, other.node.attributes.symlink_target) == (7, b"target")
    shelf.refuses(InvalidArgument, shelf.copy, "l", "dir/")
    moved = shelf.move("l", "dir/moved")
    assert moved.node_id == made.node_id
    assert shelf.all_keys() == ["dir/l2", "dir/moved", "l3"]


def test_attributes_change_in_place_and_a_folder_that_nobody_made_stays_one() -> None:
    shelf = Shelf()
    shelf.put("f/x")
    before = shelf.get("f/")
    assert before is not None
    changed = change(shelf, "f/", mode=0o700, xattrs={"user.a": b"1"})
    assert (changed.node_id, changed.node.blob, changed.node.mode) == (before.node_id, None, 0o700)
    assert (changed.node.ctime_ns, changed.node.mtime_ns) == (LATER_NS, NOW_NS)
    assert shelf.all_keys() == ["f/x"]
    made = shelf.make_folder("f")
    assert (made.node.mode, made.node.attributes.xattrs) == (0o700, {"user.a": b"1"})
    shelf.remove("f/")
    shelf.remove("f/x")
    assert shelf.all_keys() == []
    change(shelf, "", mode=0o711)
    bucket = shelf.get("")
    assert bucket is not None
    assert bucket.node.mode == 0o711
    assert shelf.events()[-1] == ("put", "")


def times(shelf: Shelf, key: str) -> tuple[int, int]:
    found = shelf.get(key)
    assert found is not None
    return (found.node.mtime_ns, found.node.ctime_ns)


def test_a_folder_notes_when_names_come_to_it_and_go() -> None:
    shelf = Shelf()
    shelf.make_folder("f")
    shelf.put("f/x")
    shelf.put("f/deep/er/y")
    long = "n" * 1000
    changes: list[Callable[[Transaction, int], object]] = [
        lambda txn, now: bind(txn, shelf.bucket, "f/new", an_object(), NO_CONDITION, now),
        lambda txn, now: bind(txn, shelf.bucket, "f/" + long, an_object(), NO_CONDITION, now),
        lambda txn, now: make_folder(txn, shelf.bucket, "f/folder", True, now),
        lambda txn, now: make_symlink(txn, shelf.bucket, "f/link", b"x", PLAIN, now),
        lambda txn, now: rename(txn, shelf.bucket, "f/x", shelf.bucket, "f/z", True, now),
        lambda txn, now: remove(txn, shelf.bucket, "f/" + long, NO_CONDITION, now).found,
        lambda txn, now: remove(txn, shelf.bucket, "f/deep/er/y", NO_CONDITION, now).found,
        lambda txn, now: remove_folder(txn, shelf.bucket, "f/folder", NO_CONDITION, now),
        lambda txn, now: rename(txn, shelf.bucket, "f/z", shelf.bucket, "z", True, now),
    ]
    for number, change_names in enumerate(changes):
        now_ns = LATER_NS + 100 * number
        shelf.store.run(lambda txn, call=change_names, now=now_ns: call(txn, now))  # type: ignore[misc]
        assert times(shelf, "f/") == (now_ns, now_ns), number
    assert times(shelf, "") == (now_ns, now_ns)


def test_what_changes_no_names_leaves_the_folders_times() -> None:
    shelf = Shelf()
    shelf.put("f/x")
    shelf.put("f/d/y")
    before = times(shelf, "f/")
    shelf.store.run(lambda txn: bind(txn, shelf.bucket, "f/x", an_object("2"), NO_CONDITION, LATER_NS))
    change(shelf, "f/x", mode=0o600)
    after = times(shelf, "f/d/")
    shelf.store.run(lambda txn: bind(txn, shelf.bucket, "f/d/z", an_object(), NO_CONDITION, LATER_NS))
    assert times(shelf, "f/") == before
    assert times(shelf, "f/d/") > after


def test_a_name_of_a_moment_ago_does_not_turn_a_folders_times_back() -> None:
    shelf = Shelf()
    shelf.make_folder("f")
    for count, (name, named_ns) in enumerate((("a", LATER_NS), ("b", LATER_NS - 1), ("c", LATER_NS - 2))):
        binding = Binding(shelf.bucket, f"f/{name}", an_object(), named_ns=named_ns)
        shelf.store.run(lambda txn, one=binding: bind_many(txn, [one], LATER_NS + 50))  # type: ignore[misc]
        assert times(shelf, "f/") == (LATER_NS, LATER_NS + count), "the change time says that its names have changed"


def test_a_folders_change_time_moves_with_each_name_also_where_the_clock_does_not() -> None:
    shelf = Shelf()
    shelf.make_folder("f")
    for count in range(1, 4):
        shelf.put(f"f/{count}")
        assert times(shelf, "f/") == (NOW_NS, NOW_NS + count)


def test_an_access_time_is_kept_when_it_is_not_the_modification_time() -> None:
    shelf = Shelf()
    shelf.put("k")
    assert change(shelf, "k", mtime_ns=5).node.attributes.atime_ns == NOW_NS
    assert change(shelf, "k", atime_ns=7).node.attributes.atime_ns == 7
    assert change(shelf, "k", mode=0o600).node.attributes.atime_ns == 7
    assert change(shelf, "k", mtime_ns=7).node.attributes.atime_ns is None
    assert change(shelf, "k", mtime_ns=8, atime_ns=0).node.attributes.atime_ns == 0


def test_attributes_that_do_not_fit_change_nothing() -> None:
    shelf = Shelf()
    shelf.put("k")
    half = bytes(ATTRIBUTES_BYTES_MAX * 2 // 3)
    change(shelf, "k", xattrs={"user.a": half})
    shelf.refuses(RequestTooLarge, lambda: change(shelf, "k", xattrs={"user.b": half}))
    change(shelf, "k", xattrs={"user.a": None, "user.b": half})
    shelf.refuses(KeyNotFound, lambda: change(shelf, "k", xattrs={"user.a": None}))
    shelf.refuses(KeyNotFound, lambda: change(shelf, "k/", mode=0))
    big = ObjectAttributes(xattrs={"user.a": half, "user.b": half})
    shelf.refuses(RequestTooLarge, link, shelf, "new/l", b"t", big)
    shelf.refuses(RequestTooLarge, lambda: shelf.store.run(lambda t: make_folder(t, shelf.bucket, "d", False, 1, big)))
    assert shelf.all_keys() == ["k"]


def test_a_folder_that_stays_becomes_one_that_was_made_and_is_told_of() -> None:
    shelf = Shelf()
    shelf.put_all(["a/b/x", "a/" + "n" * 1000, "top"])
    change(shelf, "a/b/", mode=0o750)
    shelf.store.notes.clear()
    shelf.store.run(lambda txn: remove(txn, shelf.bucket, "a/b/x", NO_CONDITION, NOW_NS, True).found)
    kept = shelf.get("a/b/")
    assert kept is not None
    assert (kept.node.blob, kept.node.mode) == (EMPTY_BLOB, 0o750)
    assert shelf.events() == [("delete", "a/b/x"), ("put", "a/b/")]
    assert shelf.store.notes[-1][1] == NameEvent("put", "b", "a/b/", kept.node_id, blob=EMPTY_BLOB)
    shelf.remove_folder("a/b")
    shelf.store.notes.clear()
    shelf.store.run(lambda txn: rename(txn, shelf.bucket, "a/" + "n" * 1000, shelf.bucket, "y", True, LATER_NS, True))
    assert shelf.events() == [("rename", "a/" + "n" * 1000, "y"), ("put", "a/")]
    shelf.store.run(lambda txn: remove(txn, shelf.bucket, "top", NO_CONDITION, NOW_NS, True).found)
    assert shelf.all_keys() == ["a/", "y"]


def test_a_move_is_a_change_of_the_node_that_moves() -> None:
    shelf = Shelf()
    shelf.put("a/x")
    shelf.put("c/x")

    def move(key: str, to_key: str) -> None:
        before = shelf.get(key)
        moved = shelf.store.run(lambda txn: rename(txn, shelf.bucket, key, shelf.bucket, to_key, True, LATER_NS))
        assert moved == shelf.get(to_key)
        assert before is not None
        assert (before.node.ctime_ns, moved.node.ctime_ns) == (NOW_NS, LATER_NS)
        assert (moved.node_id, moved.node.mtime_ns) == (before.node_id, before.node.mtime_ns)

    move("a/x", "a/y")
    move("c/", "d/")


def test_fsck_finds_a_symlink_that_lost_its_target() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            stat = await put(client, "k", b"content")
            broken = Node(kind=NodeKind.SYMLINK, size_bytes=3)

            def alter(txn: Transaction) -> None:
                key = txn.scan(Table.NAMES, node_key(NodeId(2)), node_key(NodeId(3)))
                (name,) = [found for found, _ in key]
                txn.put(Table.NODES, node_key(NodeId(stat.node)), broken.pack())
                txn.put(Table.NAMES, name, b"\x01\x03" + stat.node.to_bytes(8, "little"))

            assert (await fsck(client))["damage"] == 0
            await tamper(store, alter)
            report = await fsck(client)
            assert report["damage"] == 1
            (finding,) = [found for found in report["findings"] if found["severity"] == "damage"]
            assert finding["object"] == "bkt/k"
            assert "symlink" in finding["message"]
            assert finding["code"] == "symlink-damaged"

    run(main)
