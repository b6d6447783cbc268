"""Names against a model: a bucket is a plain dictionary of full keys, and the tree must not be told from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.buckets import ensure_bucket
from engine.format import NODE_HEAD, EtagKind, Node, NodeKind, Table, node_key
from engine.listing import list_names
from engine.names import (
    Binding,
    bind,
    bind_many,
    copy,
    iter_nodes,
    make_folder,
    remove_folder,
    rename,
    require,
    resolve,
    unbind,
)
from engine.object_stat import etag_of, new_object, to_list_entry, to_object_stat
from engine.tree import NameEvent, Resolved
from engine.views import Transaction
from lakefs.errors import (
    AlreadyExists,
    FolderNotEmpty,
    IndexDamaged,
    InvalidArgument,
    InvalidName,
    KeyNotFound,
    NotAFolder,
    PreconditionFailed,
    RequestTooLarge,
    UserError,
)
from lakefs.ids import (
    EMPTY_BLOB,
    BlobId,
    DomainIndex,
    NodeId,
    blob_of,
    manifest_chunk_id,
)
from lakefs.wire.messages import NO_CONDITION, Condition, ObjectAttributes
from tests.unit.nasty_keys import keys
from tests.unit.shelf import NOW_NS, PLAIN, Shelf, an_object, blob
from tests.unit.tree_check import check_tree

# --- binding -----------------------------------------------------------------------------------------


def test_a_bound_key_is_found_with_its_record() -> None:
    shelf = Shelf()
    bound = shelf.put("a/b/c", "hello")
    assert shelf.get("a/b/c") == bound
    assert bound.node.blob == blob("hello")
    assert shelf.all_keys() == ["a/b/c"]
    assert shelf.get("a/b") is None
    folder = shelf.get("a/b/")
    assert folder is not None
    assert folder.kind is NodeKind.FOLDER
    assert folder.node.blob is None
    assert resolve(shelf.store.view(), shelf.bucket, "") == Resolved(
        shelf.bucket.node, require(shelf.store.view(), shelf.bucket, "").node
    )


def test_an_overwrite_makes_a_new_node_and_leaves_no_old_one() -> None:
    shelf = Shelf()
    first = shelf.put("a", "one")
    second = shelf.put("a", "two")
    assert second.node_id != first.node_id
    assert node_key(first.node_id) not in shelf.store.tables[Table.NODES]
    assert shelf.all_keys() == ["a"]


def test_object_and_folder_of_one_name_coexist() -> None:
    shelf = Shelf()
    shelf.put("a", "object")
    shelf.put("a/b", "below")
    shelf.put("a/", "own")
    assert shelf.all_keys() == ["a", "a/", "a/b"]
    shelf.remove("a")
    assert shelf.all_keys() == ["a/", "a/b"]


def test_a_key_with_a_final_slash_sets_the_blob_of_the_folder_and_keeps_its_node() -> None:
    shelf = Shelf()
    shelf.put("a/b")
    implicit = shelf.get("a/")
    assert implicit is not None
    own = shelf.put("a/", "own")
    assert own.node_id == implicit.node_id
    assert own.kind is NodeKind.FOLDER
    assert own.node.blob == blob("own")
    assert own.node.mode == 0o755
    assert shelf.put("new/", "") == shelf.get("new/")
    assert shelf.all_keys() == ["a/", "a/b", "new/"]


def test_a_folder_is_not_bound_to_a_symlink() -> None:
    shelf = Shelf()
    link = Node(kind=NodeKind.SYMLINK, blob=EMPTY_BLOB)
    refusal = shelf.refuses(
        InvalidArgument,
        lambda: shelf.store.run(lambda t: bind(t, shelf.bucket, "a/", link, NO_CONDITION, NOW_NS)),
    )
    assert "'b/a/'" in refusal


@pytest.mark.parametrize("key", ["", "a\0", "k" * 1025, "\ud800"])
def test_a_key_that_is_refused_changes_nothing(key: str) -> None:
    shelf = Shelf()
    shelf.put("a")
    shelf.refuses(InvalidName, lambda: shelf.put(key))
    shelf.refuses(InvalidName, lambda: shelf.copy("a", key))
    shelf.refuses(UserError, lambda: shelf.move("a", key))


def test_more_attributes_than_64_kib_are_refused() -> None:
    shelf = Shelf()
    node = new_object(blob("x"), 1, 1, ObjectAttributes(user_metadata={"k": "v" * 70_000}), NOW_NS)
    shelf.refuses(
        RequestTooLarge,
        lambda: shelf.store.run(lambda t: bind(t, shelf.bucket, "a", node, NO_CONDITION, NOW_NS)),
    )


def test_a_batch_binds_what_it_can_and_tells_what_it_could_not() -> None:
    shelf = Shelf("b", "c")
    shelf.put("taken")
    b, c = shelf.buckets
    items = [
        Binding(b, "x/y/" + "m" * 600, an_object("0")),
        Binding(b, "x/y/1", an_object("1")),
        Binding(b, "taken", an_object("2"), Condition(absent=True)),
        Binding(b, "x/y/2", an_object("3")),
        Binding(c, "x/y/2", an_object("4")),
        Binding(b, "x/y/", an_object("5")),
        Binding(b, "x/y/" + "l" * 600, an_object("6")),
        Binding(b, "", an_object("7")),
        Binding(b, "x/y/1", an_object("8")),
        Binding(b, "x/z/w/1", an_object("9"), Condition(etags=["*"])),
        Binding(b, "x/y/" + "l" * 600 + "/m", an_object("10")),
    ]
    results = shelf.store.run(lambda txn: bind_many(txn, items, NOW_NS))
    failed = [i for i, result in enumerate(results) if isinstance(result, UserError)]
    assert failed == [2, 7, 9]
    assert isinstance(results[2], PreconditionFailed)
    long = "b/x/y/" + "l" * 600
    assert shelf.all_keys() == sorted(
        ["b/taken", "b/x/y/", "b/x/y/1", "b/x/y/2", "c/x/y/2", long, long + "/m", "b/x/y/" + "m" * 600]
    )
    assert resolve(shelf.store.view(), b, "x/y/1") == results[8]


def test_a_batch_looks_shared_parents_up_once() -> None:
    shelf = Shelf()
    shelf.put("a/b/c/d/first")
    items = [Binding(shelf.bucket, f"a/b/c/d/{i}", an_object()) for i in range(64)]
    before = shelf.store.reads()
    shelf.store.run(lambda txn: bind_many(txn, items, NOW_NS))
    assert shelf.store.reads() - before == 4 + 64


# --- conditions --------------------------------------------------------------------------------------


def test_conditions_hold_or_name_the_object_and_the_reason() -> None:
    shelf = Shelf()
    etag = etag_of(shelf.put("dir/a", "one").node)
    node = shelf.get("dir/a")
    assert node is not None
    for bad, reason in [
        (Condition(absent=True), "it exists already"),
        (Condition(etags=["nope"]), f"its ETag is {etag}"),
        (Condition(not_etags=[etag]), "was excluded"),
        (Condition(not_etags=["*"]), "was excluded"),
        (Condition(node=node.node_id + 1), "replaced meanwhile"),
        (Condition(etags=["*"], node=node.node_id + 1), "replaced meanwhile"),
    ]:
        refusal = shelf.refuses(PreconditionFailed, shelf.put, "dir/a", "two", bad)
        assert reason in refusal
        assert "'b/dir/a'" in refusal
        shelf.refuses(PreconditionFailed, shelf.remove, "dir/a", bad)
    for missing in [Condition(etags=["*"]), Condition(etags=[etag]), Condition(node=5)]:
        refusal = shelf.refuses(PreconditionFailed, shelf.put, "new/dir/b", "two", missing)
        assert "does not exist" in refusal
        shelf.refuses(PreconditionFailed, shelf.remove, "new/dir/b", missing)
    shelf.put("dir/a", "one", Condition(etags=["other", etag], not_etags=["x"], node=node.node_id))
    shelf.put("dir/a", "one", Condition(etags=["*"]))
    shelf.put("fresh", "one", Condition(absent=True, not_etags=["*"]))


def test_a_folder_that_nobody_made_is_absent_as_a_key() -> None:
    shelf = Shelf()
    shelf.put("a/b")
    shelf.refuses(PreconditionFailed, lambda: shelf.put("a/", "own", Condition(etags=["*"])))
    shelf.put("a/", "own", Condition(absent=True))
    shelf.refuses(PreconditionFailed, lambda: shelf.put("a/", "own", Condition(absent=True)))


# --- removing ----------------------------------------------------------------------------------------


def test_folders_that_nobody_made_vanish_with_their_last_child() -> None:
    shelf = Shelf()
    before = shelf.store.dump()
    long = "x" * 1000
    shelf.put(f"a//b/{long}")
    shelf.put(f"a//b/{long[:480]}")
    removed = shelf.remove(f"a//b/{long}")
    assert removed is not None
    assert removed.node.blob == blob("x")
    assert shelf.all_keys() == [f"a//b/{long[:480]}"]
    shelf.remove(f"a//b/{long[:480]}")
    assert shelf.store.dump() == before
    assert shelf.remove("a//b/c") is None


def test_a_folder_that_was_made_stays_when_it_is_empty() -> None:
    shelf = Shelf()
    shelf.make_folder("a/b")
    shelf.put("a/b/c/d")
    shelf.remove("a/b/c/d")
    assert shelf.all_keys() == ["a/b/"]
    shelf.remove_folder("a/b/")
    assert shelf.all_keys() == []


def test_removing_a_folders_own_key_leaves_what_is_below_it() -> None:
    shelf = Shelf()
    shelf.put("a/", "own")
    shelf.put("a/b")
    removed = shelf.remove("a/")
    assert removed is not None
    assert removed.node.blob == blob("own")
    assert shelf.all_keys() == ["a/b"]
    assert shelf.remove("a/") is None
    shelf.remove("a/b")
    assert shelf.get("a/") is None


def test_only_an_empty_folder_is_removed() -> None:
    shelf = Shelf()
    shelf.put("a/b/c")
    shelf.put("a/file")
    assert "'b/a/b/'" in shelf.refuses(FolderNotEmpty, lambda: shelf.remove_folder("a/b"))
    shelf.refuses(NotAFolder, lambda: shelf.remove_folder("a/file"))
    shelf.refuses(KeyNotFound, lambda: shelf.remove_folder("a/none"))
    shelf.refuses(KeyNotFound, lambda: shelf.remove_folder("none/none/"))
    shelf.refuses(InvalidName, lambda: shelf.remove_folder(""))
    shelf.refuses(InvalidName, lambda: shelf.remove(""))


def test_removing_in_order_looks_at_a_bounded_number_of_records() -> None:
    shelf = Shelf()
    names = [f"dir/{i:05}" for i in range(300)]
    for name in names:
        shelf.put(name)
    for name in names[:-1]:
        before = shelf.store.reads()
        shelf.remove(name)
        assert shelf.store.reads() - before <= 5
    shelf.remove(names[-1])
    assert shelf.all_keys() == []


# --- folders -----------------------------------------------------------------------------------------


def test_making_a_folder_twice_is_fine_unless_it_must_be_new() -> None:
    shelf = Shelf()
    made = shelf.make_folder("a/b/")
    assert shelf.make_folder("a/b") == made
    shelf.put("file")
    shelf.put("implicit/x")
    for taken in ["a/b", "a", "file", "implicit/", ""]:
        assert "exists already" in shelf.refuses(AlreadyExists, shelf.make_folder, taken, True)
    shelf.make_folder("file")
    shelf.make_folder("implicit")
    shelf.remove("implicit/x")
    assert shelf.all_keys() == ["a/b/", "file", "file/", "implicit/"]
    assert shelf.make_folder("").node_id == shelf.bucket.node


# --- moving ------------------------------------------------------------------------------------------


def test_moving_an_object_keeps_its_node_and_tidies_both_ends() -> None:
    shelf = Shelf()
    bound = shelf.put("from/deep/x")
    shelf.put("to/y", "old")
    assert shelf.move("from/deep/x", "to/y") == bound
    assert shelf.all_keys() == ["to/y"]
    assert shelf.get("from/") is None
    assert shelf.move("to/y", "new/parents/" + "z" * 700) == bound
    assert shelf.all_keys() == ["new/parents/" + "z" * 700]


def test_moving_a_folder_moves_one_record_whatever_is_below_it() -> None:
    costs = []
    for count in (1, 2000):
        shelf = Shelf()
        shelf.put_all(f"a/big/{i}/{i}" for i in range(count))
        shelf.put("a/stays")
        before = shelf.store.reads()
        mutations: list[int] = []

        def moved(txn: Any, s: Shelf = shelf, m: list[int] = mutations) -> None:
            rename(txn, s.bucket, "a/big/", s.bucket, "other/place/", True, NOW_NS)
            m.append(txn.mutations)

        shelf.store.run(moved)
        costs.append((shelf.store.reads() - before, mutations))
        assert sum(key.startswith("other/place/") for key in shelf.all_keys()) == count
    assert costs[0] == costs[1]
    assert costs[1][0] <= 10
    assert costs[1][1] == [2 + 2]  # the record moved; `other/` was made


def test_moving_a_folder_to_where_its_parent_ends_keeps_shared_parents() -> None:
    shelf = Shelf()
    shelf.put("a/b/c/x")
    shelf.move("a/b/c/", "a/c/")
    assert shelf.all_keys() == ["a/c/x"]
    assert shelf.get("a/b/") is None
    shelf.move("a/c/", "a/b/c/d/")
    assert shelf.all_keys() == ["a/b/c/d/x"]
    shelf.refuses(FolderNotEmpty, lambda: shelf.move("a/b/c/d/", "a/b/"))


def test_what_a_move_cannot_do_is_refused_with_the_reason() -> None:
    shelf = Shelf("b", "c")
    shelf.put("dir/sub/x")
    shelf.put("full/y")
    shelf.put("object")
    shelf.make_folder("empty")
    assert "below itself" in shelf.refuses(InvalidArgument, lambda: shelf.move("dir/", "dir/sub/new/"))
    assert "not empty" in shelf.refuses(FolderNotEmpty, lambda: shelf.move("dir/", "full/"))
    assert "one kind" in shelf.refuses(InvalidArgument, lambda: shelf.move("dir/", "object2"))
    assert "one kind" in shelf.refuses(InvalidArgument, lambda: shelf.move("object", "dir2/"))
    assert "bucket" in shelf.refuses(InvalidArgument, lambda: shelf.move("", "x/"))
    assert "bucket" in shelf.refuses(InvalidArgument, lambda: shelf.move("dir/", ""))
    assert "exists already" in shelf.refuses(
        AlreadyExists, lambda: shelf.move("dir/", "empty/", replace=False)
    )
    assert "exists already" in shelf.refuses(
        AlreadyExists, lambda: shelf.move("object", "full/y", replace=False)
    )
    shelf.refuses(KeyNotFound, lambda: shelf.move("none", "none"))
    shelf.refuses(KeyNotFound, lambda: shelf.move("dir", "dir"))
    other = msgspec.structs.replace(shelf.buckets[1], domain=DomainIndex(1))
    assert "domains" in shelf.refuses(InvalidArgument, lambda: shelf.move("object", "object", to=other))


def test_a_folder_replaces_an_empty_one_and_moves_between_buckets() -> None:
    shelf = Shelf("b", "c")
    shelf.put("dir/x")
    shelf.make_folder("empty")
    shelf.move("dir/", "empty/")
    assert shelf.all_keys() == ["b/empty/x"]
    shelf.move("empty/", "empty/", to=shelf.buckets[1])
    assert shelf.all_keys() == ["c/empty/x"]


def test_moving_onto_itself_changes_nothing() -> None:
    shelf = Shelf()
    shelf.put("a/x")
    before = shelf.store.dump()
    shelf.move("a/x", "a/x")
    shelf.move("a/", "a/", replace=False)
    assert shelf.store.dump() == before
    assert shelf.events() == [("put", "a/x")]


def test_keys_that_a_move_made_too_long_can_still_be_read_moved_and_removed() -> None:
    shelf = Shelf()
    tail = "/".join("t" * 100 for _ in range(10))
    shelf.put("a/" + tail)
    shelf.put("a/2" + tail[:600])
    deep = "/".join("d" * 90 for _ in range(10))
    shelf.move("a/", deep + "/")
    long = f"{deep}/{tail}"
    assert shelf.get(long) is not None
    (second, first), after = list_names(shelf.store.view(), shelf.bucket)
    assert (first.key, after) == (long, "")
    (again,), _ = list_names(shelf.store.view(), shelf.bucket, after=second.key)
    assert again == first
    shelf.move(second.key, "short")
    assert shelf.remove(long) is not None
    assert shelf.all_keys() == ["short"]


# --- copying -----------------------------------------------------------------------------------------


def test_a_copy_has_the_blob_and_etag_and_its_own_node_and_time() -> None:
    shelf = Shelf()
    attributes = ObjectAttributes(
        content_type="text/plain",
        user_metadata={"k": "v"},
        etag_kind=1,
        etag=bytes(16),
        checksums={"crc": b"1"},
    )
    node = new_object(blob("x"), 1, 1, attributes, NOW_NS)
    bound = shelf.store.run(lambda t: bind(t, shelf.bucket, "a", node, NO_CONDITION, NOW_NS))
    copied = shelf.copy("a", "dir/b")
    assert copied.node_id != bound.node_id
    assert copied.node == msgspec.structs.replace(node, mtime_ns=NOW_NS + 1, ctime_ns=NOW_NS + 1)
    given = ObjectAttributes(mode=0o600, mtime_ns=5, content_type="b/c", etag_kind=1, etag=b"e" * 16)
    changed = shelf.copy("a", "a", given).node
    assert (changed.mode, changed.mtime_ns, changed.attributes.content_type) == (0o600, 5, "b/c")
    assert changed.attributes.user_metadata == {}
    assert changed.attributes.checksums == {"crc": b"1"}
    assert etag_of(changed) == etag_of(node) == "0" * 32
    assert shelf.all_keys() == ["a", "dir/b"]


def test_a_copy_between_a_folders_key_and_an_object_takes_the_kind_of_its_place() -> None:
    shelf = Shelf()
    shelf.put("a/", "own")
    assert shelf.copy("a/", "b").kind is NodeKind.OBJECT
    assert shelf.copy("b", "c/").kind is NodeKind.FOLDER
    assert shelf.all_keys() == ["a/", "b", "c/"]


def test_a_copy_needs_a_source_with_content_in_the_same_domain() -> None:
    shelf = Shelf()
    shelf.put("a/b")
    for missing in ["a", "a/", "none/x", ""]:
        shelf.refuses(KeyNotFound, shelf.copy, missing, "c")
    shelf.refuses(PreconditionFailed, lambda: shelf.copy("a/b", "a/b", condition=Condition(absent=True)))
    other = msgspec.structs.replace(shelf.bucket, domain=DomainIndex(1))
    shelf.refuses(
        InvalidArgument,
        lambda: shelf.store.run(
            lambda t: copy(t, shelf.bucket, "a/b", other, "c", None, NO_CONDITION, NOW_NS)
        ),
    )


# --- records and messages ----------------------------------------------------------------------------


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
    with pytest.raises(IndexDamaged, match="fsck"):
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
    assert puts == [blob("x"), blob("x"), blob("x"), EMPTY_BLOB, blob("x")]


# --- the model ---------------------------------------------------------------------------------------


class NamesAgainstADictionary(RuleBasedStateMachine):
    """Two buckets; the model of each is a dictionary from full key to blob, folders being prefixes of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf("b", "c")
        self.model: list[dict[str, BlobId]] = [{}, {}]
        self.texts = 0
        self.pool: list[str] = []

    @initialize(pool=st.lists(keys(), min_size=4, max_size=10, unique=True))
    def choose(self, pool: list[str]) -> None:
        """Few keys and their prefixes, so that they meet."""
        cuts = [k[: i + 1] for k in pool for i, c in enumerate(k) if c == "/"]
        self.pool = pool + cuts

    def key(self, index: int) -> str:
        return self.pool[index % len(self.pool)]

    def below(self, which: int, folder: str) -> list[str]:
        return [k for k in self.model[which] if k.startswith(folder) and k != folder]

    def is_object(self, which: int, key: str) -> bool:
        return key in self.model[which] and not key.endswith("/")

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

    @rule(which=st.integers(0, 1), index=st.integers(0, 99))
    def remove(self, which: int, index: int) -> None:
        key, bucket = self.key(index), self.shelf.buckets[which]
        removed = self.shelf.store.run(lambda t: unbind(t, bucket, key, NO_CONDITION))
        assert (removed.node.blob if removed else None) == self.model[which].pop(key, None)

    @rule(which=st.integers(0, 1), index=st.integers(0, 99))
    def remove_empty_folder(self, which: int, index: int) -> None:
        key, model, bucket = self.key(index), self.model[which], self.shelf.buckets[which]
        folder = key if key.endswith("/") else key + "/"
        error: type[UserError] | None = None
        if self.below(which, folder):
            error = FolderNotEmpty
        elif folder not in model:
            error = NotAFolder if self.is_object(which, folder[:-1]) else KeyNotFound
        self.attempt(error, lambda t: remove_folder(t, bucket, key, NO_CONDITION))
        if error is None:
            del model[folder]

    @rule(which=st.integers(0, 1), index=st.integers(0, 99), exclusive=st.booleans())
    def make(self, which: int, index: int, exclusive: bool) -> None:
        key, model, bucket = self.key(index), self.model[which], self.shelf.buckets[which]
        folder = key if key.endswith("/") else key + "/"
        error: type[UserError] | None = None
        if len(folder.encode()) > 1024:
            error = InvalidName
        elif exclusive and (
            folder in model or self.is_object(which, folder[:-1]) or self.below(which, folder)
        ):
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
    )
    def move(self, which: int, index: int, to: int, to_index: int, replace: bool) -> None:
        key, to_key = self.key(index), self.key(to_index)
        source, target = self.shelf.buckets[which], self.shelf.buckets[to]
        error = self.refusal_of_move(which, key, to, to_key, replace)
        self.attempt(error, lambda t: rename(t, source, key, target, to_key, replace, NOW_NS))
        if error is not None or (which, key) == (to, to_key):
            return
        moving = [key, *self.below(which, key)] if key.endswith("/") else [key]
        moved = {to_key + k[len(key) :]: self.model[which].pop(k) for k in moving if k in self.model[which]}
        self.model[to].pop(to_key, None)
        self.model[to].update(moved)

    def refusal_of_move(
        self, which: int, key: str, to: int, to_key: str, replace: bool
    ) -> type[UserError] | None:
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

    @rule(
        which=st.integers(0, 1), index=st.integers(0, 99), to=st.integers(0, 1), to_index=st.integers(0, 99)
    )
    def copy(self, which: int, index: int, to: int, to_index: int) -> None:
        key, to_key = self.key(index), self.key(to_index)
        source, target = self.shelf.buckets[which], self.shelf.buckets[to]
        error = None if key in self.model[which] else KeyNotFound
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
                present = found.node.blob if found else None
                assert present == model.get(key)

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
                    assert entry.blob == self.model[which].get(entry.key, b"")


def modelled_listing(model: dict[str, BlobId], prefix: str, delimiter: str, folders: bool) -> list[str]:
    """Elements of a listing, from the definition."""
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
TestNamesAgainstADictionary.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_ensuring_a_bucket_finds_or_makes_it() -> None:
    shelf = Shelf()
    assert shelf.store.run(lambda t: ensure_bucket(t, "b", 1)) == shelf.bucket
    made = shelf.store.run(lambda t: ensure_bucket(t, "new", 1))
    assert made.node != shelf.bucket.node
