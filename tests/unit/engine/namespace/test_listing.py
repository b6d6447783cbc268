"""LIST: S3's definition by example, and the cost of a page.  The model-based test is in `test_names_model`."""

from __future__ import annotations

import pytest

from engine.namespace.binding import bind
from engine.namespace.listing import list_names
from lakefs.errors import InvalidArgument
from lakefs.ids import EMPTY_BLOB
from lakefs.limits import LIST_PAGE_MAX
from lakefs.wire.messages import NO_CONDITION
from tests.unit.support.shelf import NOW_NS, Shelf, an_object, blob

LONG = "x" * 480


def shelf_of(*keys: str) -> Shelf:
    shelf = Shelf()
    shelf.put_all(keys)
    return shelf


def listed(
    shelf: Shelf, prefix: str = "", after: str = "", delimiter: str = "", limit: int = 1000, folders: bool = False
) -> tuple[list[str], str]:
    """Return the keys of a page, and where to continue."""
    entries, following = list_names(shelf.store.view(), shelf.bucket, prefix, after, delimiter, limit, folders)
    return [entry.key for entry in entries], following


def test_keys_come_in_byte_order_and_not_in_folder_order() -> None:
    keys = ["a", "a!", "a-b", "a.txt", "a/", "a/b", "a//", "a//b", "a/b/c", "a0", "é", "\U0001f642"]
    assert listed(shelf_of(*reversed(keys))) == (sorted(keys, key=str.encode), "")


def test_a_prefix_may_end_inside_a_component() -> None:
    shelf = shelf_of("ab/x", "abc", "abd/y", "b", LONG + "1/x", LONG + "12", LONG + "2")
    assert listed(shelf, "ab") == (["ab/x", "abc", "abd/y"], "")
    assert listed(shelf, "abd/") == (["abd/y"], "")
    assert listed(shelf, "abd/yy") == ([], "")
    assert listed(shelf, "none/ab") == ([], "")
    assert listed(shelf, LONG[:100]) == ([LONG + "1/x", LONG + "12", LONG + "2"], "")
    assert listed(shelf, LONG + "1") == ([LONG + "1/x", LONG + "12"], "")
    assert listed(shelf, LONG + "1/") == ([LONG + "1/x"], "")


def test_the_delimiter_rolls_up_what_lies_behind_it() -> None:
    shelf = shelf_of("asdf", "boo/bar", "boo/baz/xyzzy", "cquux/thud", "cquux/bla", LONG + "/a", LONG + "b")
    assert listed(shelf, delimiter="/") == (["asdf", "boo/", "cquux/", LONG + "/", LONG + "b"], "")
    assert listed(shelf, "boo/", delimiter="/") == (["boo/bar", "boo/baz/"], "")
    assert listed(shelf, "boo", delimiter="/") == (["boo/"], "")
    assert listed(shelf, "boo/b", delimiter="/") == (["boo/bar", "boo/baz/"], "")
    entries, _ = list_names(shelf.store.view(), shelf.bucket, "boo/", delimiter="/")
    assert [(entry.is_prefix, entry.etag == "") for entry in entries] == [(False, False), (True, True)]


def test_pages_with_a_delimiter_continue_behind_a_rolled_up_prefix() -> None:
    shelf = shelf_of("asdf", "boo/bar", "boo/baz", "cquux/thud")
    assert listed(shelf, delimiter="/", limit=1) == (["asdf"], "asdf")
    assert listed(shelf, after="asdf", delimiter="/", limit=1) == (["boo/"], "boo/")
    assert listed(shelf, after="boo/", delimiter="/", limit=1) == (["cquux/"], "")
    assert listed(shelf, after="boo/bar", delimiter="/") == (["cquux/"], "")
    assert listed(shelf, after="boo", delimiter="/") == (["boo/", "cquux/"], "")
    assert listed(shelf, after="boo/") == (["boo/bar", "boo/baz", "cquux/thud"], "")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ("", ["a", "a/b", "a/c/d", "b"]),
        ("a", ["a/b", "a/c/d", "b"]),
        ("a!", ["a/b", "a/c/d", "b"]),
        ("a/", ["a/b", "a/c/d", "b"]),
        ("a/b", ["a/c/d", "b"]),
        ("a/b/none/at/all", ["a/c/d", "b"]),
        ("a/c/", ["a/c/d", "b"]),
        ("a/c/d", ["b"]),
        ("a/c/\U0001f642", ["b"]),
        ("a\0", ["a/b", "a/c/d", "b"]),
        ("a/\ud800", ["b"]),
        ("x" * 5000, []),
        ("a/" + "c" * 5000 + "/d", ["b"]),
        ("/" * 3000, ["a", "a/b", "a/c/d", "b"]),
    ],
)
def test_a_listing_begins_behind_any_text(after: str, expected: list[str]) -> None:
    assert listed(shelf_of("a", "a/b", "a/c/d", "b"), after=after) == (expected, "")


def test_a_position_outside_the_prefix_gives_all_of_it_or_nothing() -> None:
    shelf = shelf_of("a", "m/1", "m/2", "z")
    assert listed(shelf, "m/", "a") == (["m/1", "m/2"], "")
    assert listed(shelf, "m/", "m") == (["m/1", "m/2"], "")
    assert listed(shelf, "m/", "m/1") == (["m/2"], "")
    assert listed(shelf, "m/", "m0") == ([], "")
    assert listed(shelf, "m/", "z") == ([], "")


def test_a_folders_own_key_is_listed_and_a_bare_folder_only_when_asked_for() -> None:
    shelf = shelf_of("a/b/c", "own/", "own/x")
    shelf.make_folder("made")
    assert listed(shelf) == (["a/b/c", "made/", "own/", "own/x"], "")
    assert listed(shelf, folders=True) == (["a/", "a/b/", "a/b/c", "made/", "own/", "own/x"], "")
    assert listed(shelf, "a/", folders=True) == (["a/", "a/b/", "a/b/c"], "")
    assert listed(shelf, "a/", delimiter="/") == (["a/b/"], "")
    assert listed(shelf, "a/", delimiter="/", folders=True) == (["a/", "a/b/"], "")
    assert listed(shelf, "own/", delimiter="/") == (["own/", "own/x"], "")
    assert listed(shelf, "own/", "own/", delimiter="/") == (["own/x"], "")
    entries, _ = list_names(shelf.store.view(), shelf.bucket, folders=True)
    assert [(e.kind, e.blob) for e in entries][:4] == [(1, b""), (1, b""), (2, blob("x")), (1, EMPTY_BLOB)]


def test_an_empty_page_is_the_last_one() -> None:
    shelf = shelf_of("a", "b")
    assert listed(shelf, limit=0) == ([], "")
    assert listed(shelf, after="b") == ([], "")
    assert listed(shelf, limit=2) == (["a", "b"], "")
    assert listed(Shelf()) == ([], "")


def test_a_page_never_has_more_than_1000_elements() -> None:
    shelf = shelf_of(*(f"{i:04}" for i in range(1001)))
    keys, following = listed(shelf, limit=5000)
    assert (len(keys), following) == (LIST_PAGE_MAX, "0999")
    assert listed(shelf, after=following, limit=5000) == (["1000"], "")


@pytest.mark.parametrize("delimiter", ["-", "//", "/a", "\0"])
def test_another_delimiter_than_a_slash_is_refused(delimiter: str) -> None:
    with pytest.raises(InvalidArgument, match="not supported; use '/'"):
        listed(Shelf(), delimiter=delimiter)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="-1 names"):
        listed(Shelf(), limit=-1)


def test_what_stays_is_listed_once_whatever_happens_between_pages() -> None:
    stays = [f"dir{i % 3}/s{i:02}" for i in range(30)]
    goes = [f"dir{i % 3}/g{i:02}" for i in range(30)] + ["dir1/s10/below"]
    shelf = shelf_of(*stays, *goes)
    found: list[str] = []
    keys, following = listed(shelf, limit=7)
    while following:
        found += keys
        assert following == keys[-1]
        for number in range(4):
            if goes:
                shelf.remove(goes.pop())
            shelf.put(f"dir{number}/new{len(found)}{number}")
        shelf.remove(following)
        stays = [key for key in stays if key != following or key in found]
        keys, following = listed(shelf, after=following, limit=7)
    found += keys
    assert [key for key in found if key in set(stays)] == sorted(stays)
    assert len(set(found)) == len(found)


def test_keys_with_a_thousand_parts_are_listed() -> None:
    deep = ["/" * 1023 + "a", "/" * 1000 + "b/c", "a/" * 511 + "z"]
    shelf = shelf_of(*deep)
    assert listed(shelf) == (sorted(deep), "")
    assert listed(shelf, after=sorted(deep)[0]) == (sorted(deep)[1:], "")


@pytest.fixture(scope="module")
def large_shelf() -> Shelf:
    """Make 100,000 objects: 50 folders of 1,000, a folder of 49,000 below `mid/`, and 1,000 at the top."""
    shelf = Shelf()
    shelf.put_all(f"d{i // 1000:02}/{i % 1000:04}" for i in range(50_000))
    shelf.put_all(f"mid/{i:05}" for i in range(49_000))
    shelf.put_all(f"top{i:04}" for i in range(1_000))
    return shelf


@pytest.mark.parametrize(
    ("prefix", "after", "delimiter", "limit", "first", "most_reads"),
    [
        ("", "", "", 1000, "d00/0000", 2 * 1001 + 8),
        ("", "d25/0500", "", 1000, "d25/0501", 2 * 1001 + 8),
        ("", "mid/24000", "", 1000, "mid/24001", 2 * 1001 + 8),
        ("mid/3", "mid/33333", "", 10, "mid/33334", 2 * 11 + 4),
        ("", "", "/", 1000, "d00/", 2 * 1001),
        ("", "d49/", "/", 1, "mid/", 4),
        ("", "mid/25000", "/", 10, "top0000", 2 * 11),
        ("m", "", "/", 1000, "mid/", 2),
        ("", "top0998", "", 1000, "top0999", 4),
    ],
)
def test_a_page_of_100000_names_costs_what_is_on_it(
    large_shelf: Shelf, prefix: str, after: str, delimiter: str, limit: int, first: str, most_reads: int
) -> None:
    before = large_shelf.store.reads()
    keys, _ = listed(large_shelf, prefix, after, delimiter, limit)
    assert keys[0] == first
    assert large_shelf.store.reads() - before <= most_reads


def test_changes_beside_100000_names_cost_a_handful_of_reads(large_shelf: Shelf) -> None:
    store = large_shelf.store
    before = store.reads()
    large_shelf.move("mid/", "moved/")
    assert store.reads() - before <= 5
    before = store.reads()
    large_shelf.move("moved/", "mid/")
    large_shelf.put("mid/24999", "again")
    assert store.reads() - before <= 9
    before = store.reads()
    store.run(lambda txn: bind(txn, large_shelf.bucket, "mid/new", an_object(), NO_CONDITION, NOW_NS))
    assert store.reads() - before == 3
    before = store.reads()
    large_shelf.remove("mid/new")
    assert store.reads() - before <= 5
