"""Records of names: their size, their ETags, their stats, and the walk over all of them."""

from __future__ import annotations

import pytest

from engine.format.layouts import NODE_HEAD, EtagKind, Node, NodeKind, Table, node_key
from engine.namespace.names import iter_nodes
from engine.namespace.object_stat import etag_of, new_object, to_list_entry, to_object_stat
from engine.namespace.tree import NameEvent
from lakefs.errors import IndexDamaged, InvalidArgument
from lakefs.ids import EMPTY_BLOB, NodeId, blob_of, manifest_chunk_id
from lakefs.wire.messages import ObjectAttributes
from tests.unit.support.shelf import NOW_NS, PLAIN, Shelf, an_object, blob


def test_a_plain_object_of_one_chunk_costs_73_bytes() -> None:
    assert len(an_object().pack()) == NODE_HEAD.size == 73


def test_etags_come_from_digest_md5_or_multipart_text() -> None:
    chunk, manifest = blob("x"), blob_of(manifest_chunk_id(b"m"))
    assert etag_of(new_object(chunk, 1, 1, PLAIN, 0)) == chunk[1:17].hex() + "-1"
    assert etag_of(new_object(manifest, 9, 3, PLAIN, 0)) == manifest[1:17].hex() + "-3"
    assert etag_of(new_object(EMPTY_BLOB, 0, 1, PLAIN, 0)) == "d41d8cd98f00b204e9800998ecf8427e"
    md5 = ObjectAttributes(etag_kind=EtagKind.MD5, etag=b"\x01" * 16)
    assert etag_of(new_object(manifest, 9, 3, md5, 0)) == "01" * 16
    multipart = ObjectAttributes(etag_kind=EtagKind.MULTIPART, etag=b"abc-2")
    assert etag_of(new_object(manifest, 9, 3, multipart, 0)) == "abc-2"
    assert etag_of(Node(kind=NodeKind.FOLDER)) == ""


@pytest.mark.parametrize(
    "attributes",
    [
        ObjectAttributes(uid=-1),
        ObjectAttributes(gid=1 << 32),
        ObjectAttributes(mtime_ns=1 << 63),
        ObjectAttributes(etag_kind=1, etag=b"short"),
        ObjectAttributes(etag_kind=2, etag=b""),
        ObjectAttributes(etag_kind=2, etag=b"\xff-1"),
        ObjectAttributes(etag_kind=3),
    ],
)
def test_attributes_that_no_record_can_hold_are_refused(attributes: ObjectAttributes) -> None:
    with pytest.raises(InvalidArgument):
        new_object(blob("x"), 1, 1, attributes, NOW_NS)


def test_a_stat_and_a_list_entry_tell_what_the_record_holds() -> None:
    attributes = ObjectAttributes(mode=0o100640, uid=1, gid=2, content_type="t", user_metadata={"a": "b"})
    node = new_object(blob_of(manifest_chunk_id(b"m")), 9, 3, attributes, NOW_NS)
    stat = to_object_stat("b", "k", NodeId(7), node)
    assert (stat.kind, stat.node, stat.size_bytes, stat.chunk_count) == (2, 7, 9, 3)
    assert (stat.mode, stat.uid, stat.gid, stat.mtime_ns) == (0o640, 1, 2, NOW_NS)
    assert (stat.content_type, stat.user_metadata, stat.blob) == ("t", {"a": "b"}, node.blob)
    entry = to_list_entry("k", NodeId(7), node)
    assert (entry.key, entry.size_bytes, entry.etag, entry.node, entry.kind) == ("k", 9, stat.etag, 7, 2)
    bare = to_object_stat("b", "k/", NodeId(7), Node(kind=NodeKind.FOLDER))
    assert (bare.kind, bare.blob, bare.etag, bare.chunk_count) == (1, b"", "", 0)


def test_a_name_without_a_node_is_damage_and_said_so() -> None:
    shelf = Shelf()
    bound = shelf.put("a")
    del shelf.store.tables[Table.NODES][node_key(bound.node_id)]
    with pytest.raises(IndexDamaged, match="has no record"):
        shelf.get("a")


def test_all_nodes_are_walked_in_pages_and_new_ones_are_met() -> None:
    shelf = Shelf()
    for i in range(10):
        shelf.put(f"{i}")
    first = iter_nodes(shelf.store.view(), NodeId(0), 6)
    shelf.put("0", "replaced behind the walk")
    rest = iter_nodes(shelf.store.view(), first[-1][0], 100)
    assert [node_id for node_id, _ in first + rest] == list(range(1, 14))
    assert rest[-1][1].blob == blob("replaced behind the walk")
    assert iter_nodes(shelf.store.view(), rest[-1][0], 100) == []
    assert iter_nodes(shelf.store.view(), NodeId(0), 0) == []


def test_folders_that_nobody_made_are_noted_when_they_come_and_go() -> None:
    long = "x" * 600
    shelf = Shelf()
    shelf.put(f"a/{long}/k")
    shelf.put("a/other")
    shelf.make_folder("made/by/hand")
    shelf.remove(f"a/{long}/k")
    shelf.move("a/other", "made/one/other")
    shelf.remove("made/one/other")
    shelf.remove_folder("made/by/hand")
    assert shelf.events() == [
        ("put", "a/"),
        ("put", f"a/{long}/"),
        ("put", f"a/{long}/k"),
        ("put", "a/other"),
        ("put", "made/"),
        ("put", "made/by/"),
        ("put", "made/by/hand/"),
        ("delete", f"a/{long}/k"),
        ("delete", f"a/{long}/"),
        ("put", "made/one/"),
        ("rename", "a/other", "made/one/other"),
        ("delete", "a/"),
        ("delete", "made/one/other"),
        ("delete", "made/one/"),
        ("delete", "made/by/hand/"),
        ("delete", "made/by/"),
        ("delete", "made/"),
    ]


def test_every_change_is_noted_and_nothing_else() -> None:
    shelf = Shelf()
    shelf.put("a/b")
    shelf.put("a/b")
    shelf.put("a/")
    shelf.make_folder("f")
    shelf.make_folder("f")
    shelf.copy("a/b", "c")
    shelf.move("a/", "d/")
    shelf.remove("d/")
    shelf.remove("none")
    shelf.remove_folder("f")
    assert shelf.events() == [
        ("put", "a/"),
        ("put", "a/b"),
        ("put", "a/b"),
        ("put", "a/"),
        ("put", "f/"),
        ("put", "c"),
        ("rename", "a/", "d/"),
        ("delete", "d/"),
        ("delete", "f/"),
    ]
    puts = [n.blob for _, n in shelf.store.notes if isinstance(n, NameEvent) and n.kind == "put"]
    assert puts == [None, blob("x"), blob("x"), blob("x"), EMPTY_BLOB, blob("x")]
