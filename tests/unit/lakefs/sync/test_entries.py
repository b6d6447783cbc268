"""Pairs of two sides, and the change that each needs."""

from __future__ import annotations

from hypothesis import given, strategies as st

from lakefs.sync.entries import Comparison, Entry, Need, Pair, Pairing, needed

NAMES = st.text("ab!~/", min_size=1, max_size=5)
SIDES = st.sets(NAMES, max_size=12).map(sorted)


def paired(source: list[Entry], target: list[Entry], page: int) -> list[Pair]:
    pairing = Pairing()
    left = [list(source), list(target)]
    found: list[Pair] = []
    while (side := pairing.wants) is not None:
        batch, left[side] = left[side][:page], left[side][page:]
        pairing.add(side, batch or None)
        found += pairing.pairs()
    return found


@given(SIDES, SIDES, st.integers(1, 5))
def test_each_name_is_in_one_pair_whatever_the_pages(source: list[str], target: list[str], page: int) -> None:
    pairs = paired([Entry(path) for path in source], [Entry(path) for path in target], page)
    assert [pair.path for pair in pairs] == sorted({*source, *target})
    assert [pair.path for pair in pairs if pair.source is not None] == source
    assert [pair.path for pair in pairs if pair.target is not None] == target


@given(SIDES, SIDES, SIDES)
def test_nothing_is_removed_that_the_source_has_or_cannot_show(
    source: list[str], refused: list[str], target: list[str]
) -> None:
    entries = {path: Entry(path) for path in source} | {path: Entry(path, refusal="no") for path in refused}
    pairs = paired([entries[path] for path in sorted(entries)], [Entry(path) for path in target], 3)
    removed = {pair.path for pair in pairs if needed(pair, Comparison())[0] is Need.REMOVE}
    hidden = [path for path in refused if path.endswith("/")]
    for path in target:
        is_present = path in entries or any(path.startswith(folder) for folder in hidden)
        is_present |= path.endswith("/") and any(other.startswith(path) for other in entries)
        assert (path in removed) == (not is_present)


FILE = Entry("f", 5, 1000, 0o644, b"x")


def needed_for(target: Entry | None, comparison: Comparison | None = None, source: Entry = FILE) -> Need:
    return needed(Pair(source, target), comparison or Comparison())[0]


def test_size_time_and_mode_decide() -> None:
    assert needed_for(None) is Need.COPY
    assert needed_for(Entry("f", 5, 1000, 0o644, b"y")) is Need.NOTHING
    assert needed_for(Entry("f", 6, 1000, 0o644)) is Need.COPY
    assert needed_for(Entry("f", 5, 1002, 0o644)) is Need.COPY
    assert needed_for(Entry("f", 5, 1001, 0o644)) is Need.NOTHING, "a tolerance of 1 ns"
    assert needed_for(Entry("f", 5, 1000, 0o600)) is Need.COPY
    assert needed_for(Entry("f", 5, 1000, 0o4644)) is Need.NOTHING, "set-uid is never taken over"
    assert needed_for(Entry("f", 5, 1000, 0o600), Comparison(modes=False)) is Need.NOTHING


def test_contents_decide_instead_of_times() -> None:
    contents = Comparison(contents=True)
    assert needed_for(Entry("f", 5, 7, 0o600, b"x"), contents) is Need.NOTHING
    assert needed_for(Entry("f", 5, 1000, 0o644, b"y"), contents) is Need.COMPARE
    assert needed_for(Entry("f", 6, 1000, 0o644, b"x"), contents) is Need.COPY


def test_what_is_newer_at_the_target_is_left_with_update() -> None:
    update = Comparison(update=True)
    assert needed_for(Entry("f", 6, 1001), update) is Need.NEWER
    assert needed_for(Entry("f", 6, 1000), update) is Need.COPY
    assert needed_for(Entry("f", 6, 999), update) is Need.COPY
    assert needed_for(None, update) is Need.COPY


def test_what_the_target_cannot_show_gives_way_or_stays() -> None:
    link = Entry("f", refusal="a symbolic link")
    assert needed_for(link) is Need.COPY
    assert needed(Pair(None, link), Comparison())[0] is Need.NOTHING
    assert needed_for(FILE, source=link) is Need.REFUSE


def test_only_folders_that_have_to_be_made_are() -> None:
    assert needed_for(None, source=Entry("d/", is_bare=True)) is Need.FOLDER
    assert needed_for(Entry("d/"), source=Entry("d/", is_bare=True)) is Need.NOTHING
    assert needed_for(None, source=Entry("d/")) is Need.NOTHING
