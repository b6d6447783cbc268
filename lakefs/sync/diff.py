"""Diff: the names that only one side has, and those that differ.  Nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from lakefs.errors import LakeError
from lakefs.steps.steps import Steps
from lakefs.sync.contents import is_same_content
from lakefs.sync.entries import Comparison, Need, Pair, Pairing, needed
from lakefs.sync.sides import Side
from lakefs.trees.walk import is_fatal


class Difference(StrEnum):
    """The way in which a name differs."""

    ONLY_FIRST = "only in the first"
    ONLY_SECOND = "only in the second"
    DIFFERENT = "different"
    UNREADABLE = "not compared"


@dataclass(frozen=True)
class Differing:
    """One name that differs; `reason`: the reason why it is different, or could not be compared."""

    path: str
    difference: Difference
    reason: str = ""


def diff(first: Side, second: Side, comparison: Comparison, found: Callable[[Differing], None]) -> Steps[int]:
    """Compare two sides; call `found` for each name that differs, and return how many files are the same.

    Folders are no names of their own, unless their own keys have content.

    Raises the errors of a side that does not exist or cannot be listed.
    """
    same = 0
    pairing = Pairing()
    while (side := pairing.wants) is not None:
        page = yield from (first if side == 0 else second).next_page()
        pairing.add(side, page)
        for pair in pairing.pairs():
            differing = yield from _compared(first, second, pair, comparison)
            if differing is not None:
                found(differing)
            elif not pair.path.endswith("/"):
                same += 1
    return same


def _compared_folder(pair: Pair) -> Differing | None:
    """Compare what a folder's own key has as its content, in lakes where S3 clients gave it some."""
    first, second = (
        entry.blob if entry is not None and entry.size_bytes else b"" for entry in (pair.source, pair.target)
    )
    if first == second:
        return None
    difference = Difference.DIFFERENT
    if not first or not second:
        difference = Difference.ONLY_FIRST if first else Difference.ONLY_SECOND
    return Differing(pair.path, difference, "a folder's own key that has content")


def _compared(first: Side, second: Side, pair: Pair, comparison: Comparison) -> Steps[Differing | None]:
    path = pair.path
    for shown, entry in (("the first", pair.source), ("the second", pair.target)):
        if entry is not None and entry.refusal:
            return None if entry.is_shadow else Differing(path, Difference.UNREADABLE, f"{entry.refusal} in {shown}")
    if path.endswith("/"):
        return _compared_folder(pair)
    if pair.source is None:
        return Differing(path, Difference.ONLY_SECOND)
    if pair.target is None:
        return Differing(path, Difference.ONLY_FIRST)
    need, reason = needed(pair, comparison)
    if need is Need.COMPARE:
        try:
            need = Need.NOTHING if (yield from is_same_content(first, second, pair)) else Need.COPY
        except LakeError as error:
            if is_fatal(error):
                raise
            return Differing(path, Difference.UNREADABLE, error.message)
    return None if need is Need.NOTHING else Differing(path, Difference.DIFFERENT, reason)
