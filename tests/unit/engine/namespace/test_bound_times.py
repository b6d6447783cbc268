"""The time at which a key was bound to its content, beside the modification time that clients set."""

from __future__ import annotations

import msgspec
import pytest

from engine.format.layouts import NO_ATTRIBUTES, Attributes, Node, NodeKind, unpack_node
from engine.namespace.binding import Binding, bind_many
from engine.namespace.node_changes import set_attributes
from engine.namespace.object_stat import bound_at, bound_ns_of, new_object, to_list_entry, to_object_stat
from engine.namespace.tree import Resolved
from lakefs.errors import PreconditionFailed
from lakefs.wire.messages import Condition, ObjectAttributes, SetAttributes
from tests.unit.support.shelf import NOW_NS, Shelf, blob

GIVEN_NS = 981_173_106_123_456_789
LATER_NS = NOW_NS + 5_000_000_000


def put(shelf: Shelf, key: str, text: str, mtime_ns: int, now_ns: int = NOW_NS, *, keep_node: int = 0) -> Resolved:
    """Bind a key as a client does that gives a modification time, 0 for none."""
    node = new_object(blob(text), len(text), 1, ObjectAttributes(mtime_ns=mtime_ns), now_ns)
    binding = Binding(shelf.bucket, key, node, keep_node=keep_node)
    (outcome,) = shelf.store.run(lambda txn: bind_many(txn, [binding], now_ns))
    assert isinstance(outcome, Resolved)
    return outcome


def times(shelf: Shelf, key: str) -> tuple[int, int]:
    """Return modification time and time of binding, as a stat and a list have them."""
    found = shelf.get(key)
    assert found is not None
    stat = to_object_stat("b", key, found.node_id, found.node)
    entry = to_list_entry(key, found.node_id, found.node)
    assert (stat.mtime_ns, stat.bound_ns) == (entry.mtime_ns, entry.bound_ns)
    assert stat.last_modified_ns == entry.last_modified_ns == bound_ns_of(found.node)
    return stat.mtime_ns, stat.last_modified_ns


def test_a_key_is_bound_when_it_was_put_whatever_modification_time_was_given() -> None:
    shelf = Shelf()
    put(shelf, "given", "x", GIVEN_NS)
    put(shelf, "none", "x", 0)
    assert times(shelf, "given") == (GIVEN_NS, NOW_NS)
    assert times(shelf, "none") == (NOW_NS, NOW_NS)
    put(shelf, "given", "x", GIVEN_NS, LATER_NS)
    assert times(shelf, "given") == (GIVEN_NS, LATER_NS)


def test_only_a_time_that_differs_is_stored() -> None:
    plain = new_object(blob("x"), 1, 1, ObjectAttributes(), NOW_NS)
    assert plain.attributes is NO_ATTRIBUTES
    assert new_object(blob("x"), 1, 1, ObjectAttributes(mtime_ns=NOW_NS), NOW_NS) == plain
    given = new_object(blob("x"), 1, 1, ObjectAttributes(mtime_ns=GIVEN_NS), NOW_NS)
    assert unpack_node(given.pack()) == given
    assert bound_at(given, GIVEN_NS).attributes == NO_ATTRIBUTES
    assert bound_ns_of(unpack_node(plain.pack())) == NOW_NS


def test_an_older_release_reads_a_record_with_such_a_time() -> None:
    class OlderAttributes(msgspec.Struct, frozen=True, omit_defaults=True):
        etag: bytes = msgspec.field(default=b"", name="e")

    packed = msgspec.msgpack.encode(Attributes(etag=b"e", bound_ns=NOW_NS))
    assert msgspec.msgpack.decode(packed, type=OlderAttributes).etag == b"e"


def test_changed_attributes_and_a_rename_keep_the_time() -> None:
    shelf = Shelf()
    put(shelf, "k", "x", 0)

    def change(**changes: object) -> None:
        request = SetAttributes("b", "k", **changes)  # type: ignore[arg-type]
        shelf.store.run(lambda txn: set_attributes(txn, shelf.bucket, request, LATER_NS))

    change(mode=0o600)
    change(tags={"a": "b"})
    assert times(shelf, "k") == (NOW_NS, NOW_NS)
    change(mtime_ns=GIVEN_NS)
    assert times(shelf, "k") == (GIVEN_NS, NOW_NS)
    change(mtime_ns=GIVEN_NS + 1)
    shelf.move("k", "moved")
    assert times(shelf, "moved") == (GIVEN_NS + 1, NOW_NS)


def test_a_copy_is_bound_anew_and_keeps_the_modification_time_that_somebody_has_set() -> None:
    shelf = Shelf()
    put(shelf, "given", "x", GIVEN_NS)
    put(shelf, "none", "x", 0)
    shelf.copy("given", "copy")
    assert times(shelf, "copy") == (GIVEN_NS, NOW_NS + 1)
    shelf.copy("none", "copy")
    assert times(shelf, "copy") == (NOW_NS + 1, NOW_NS + 1)
    shelf.copy("given", "copy", ObjectAttributes())
    assert times(shelf, "copy") == (NOW_NS + 1, NOW_NS + 1)
    shelf.copy("none", "copy", ObjectAttributes(mtime_ns=GIVEN_NS))
    assert times(shelf, "copy") == (GIVEN_NS, NOW_NS + 1)


def test_a_kept_node_is_bound_anew_only_to_other_content() -> None:
    shelf = Shelf()
    first = put(shelf, "k", "x", GIVEN_NS)
    put(shelf, "k", "x", GIVEN_NS + 1, LATER_NS, keep_node=first.node_id)
    assert times(shelf, "k") == (GIVEN_NS + 1, NOW_NS)
    put(shelf, "k", "y", GIVEN_NS + 2, LATER_NS, keep_node=first.node_id)
    assert times(shelf, "k") == (GIVEN_NS + 2, LATER_NS)


def test_conditions_look_at_the_time_that_s3_shows() -> None:
    shelf = Shelf()
    put(shelf, "k", "x", GIVEN_NS)
    refusal = shelf.refuses(PreconditionFailed, shelf.remove, "k", Condition(mtime_s=GIVEN_NS // 10**9))
    assert "as S3 shows it" in refusal
    shelf.remove("k", Condition(mtime_s=NOW_NS // 10**9))
    assert shelf.get("k") is None


@pytest.mark.parametrize("kind", [NodeKind.FOLDER, NodeKind.SYMLINK])
def test_folders_and_symlinks_have_one_time(kind: NodeKind) -> None:
    node = Node(kind=kind, mtime_ns=GIVEN_NS)
    assert bound_ns_of(node) == GIVEN_NS
