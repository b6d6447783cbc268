"""Decides which list of good copies counts, and if the copies that are there may be opened.  Pure.

Rules kept here:
- A list counts unless another one came from it, or it was never durable on all its copies: one of them is there and
  has a list that neither came from it nor led to it.  So it was written by a process that died, or lost its devices,
  before it had an answer to give.
- More than half of the copies that the list names must be there.  At most half of them can have been thrown out by a
  later list that none of them has (`engine.cluster.good_copies`), so no stale copy opens by itself.
- `without` is an operator's word: these copies are not waited for, and count as lost.  It raises the list's term, so
  that what they hold is stale if they return.  Of two lists that both count, the one of the higher term is right; of
  equal terms, two operators have let both sides go on, and neither is opened.
- A folder whose `mirror.copy` has another inode than its list says was copied.  It does not count, unless the caller
  says that it was restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from engine.cluster.copy_list import CopyList
from lakefs.errors import StoreUnusable
from lakefs.ids import CopyId


@dataclass(frozen=True)
class FoundCopy:
    """The copy that a folder says it is.  `listed` is None in a copy that was made, and never got its first list."""

    name: str
    copy_id: CopyId
    inode: int
    listed: CopyList | None


@dataclass(frozen=True)
class Choice:
    """The list that counts, the ids of its copies that are used, and those that are not, with the reason."""

    listed: CopyList
    used: tuple[CopyId, ...]
    eligible: frozenset[CopyId]
    """Copies of the list that could have opened it: all but those that the operator gave up."""
    lost: dict[CopyId, str]
    stale: tuple[str, ...]
    """Names of folders that the list does not name."""
    by_operator: bool


def choose(
    found: Sequence[FoundCopy],
    absent: dict[str, str],
    *,
    without: frozenset[CopyId] = frozenset(),
    restored: bool = False,
) -> Choice:
    """Choose the list and its copies.  `absent`: devices that could not be read, and why.  StoreUnusable."""
    _refuse_twins(found)
    listed = _counting(found, absent, without)
    here = {copy.copy_id: copy for copy in found}
    lost: dict[CopyId, str] = {}
    for copy_id, member in listed.members.items():
        if copy_id in without:
            lost[copy_id] = "given up by the operator"
        elif copy_id not in here:
            lost[copy_id] = "its device is not here"
        elif here[copy_id].inode != member.inode and not restored:
            lost[copy_id] = f"{here[copy_id].name} is a copy of that folder, not the folder itself"
    used = tuple(copy_id for copy_id in listed.members if copy_id not in lost)
    eligible = frozenset(listed.members) - without
    if not used or 2 * len(used) <= len(eligible):
        _refuse(listed, lost, absent, without)
    stale = tuple(copy.name for copy in found if copy.copy_id not in listed.members)
    return Choice(listed, used, eligible, lost, stale, bool(without & listed.members.keys()))


def _counting(found: Sequence[FoundCopy], absent: dict[str, str], without: frozenset[CopyId]) -> CopyList:
    """Return the list that counts."""
    lists = {copy.listed.tag: copy.listed for copy in found if copy.listed is not None}
    held = {copy.copy_id: copy.listed for copy in found if copy.listed is not None}
    newest = [
        one
        for one in lists.values()
        if not any(other is not one and other.came_from(one) for other in lists.values())
        and all(_are_related(one, held[copy_id]) for copy_id in one.members if copy_id in held)
        and not one.members.keys() <= without
    ]
    if not newest:
        told = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise StoreUnusable(f"no folder has a list of good copies that can be used ({told or 'none was given'})")
    term = max(one.term for one in newest)
    counting = [one for one in newest if one.term == term]
    if len(counting) > 1:
        told = "; ".join(f"{copy.name} (copy {copy.copy_id.hex()})" for copy in found if copy.listed in counting)
        raise StoreUnusable(
            f"these copies went on without each other, and hold different changes: {told}; choose one side, and start "
            "with --without ID for each copy of the other: what only those hold is given up"
        )
    return counting[0]


def _are_related(one: CopyList, other: CopyList) -> bool:
    return one.came_from(other) or other.came_from(one)


def _refuse_twins(found: Sequence[FoundCopy]) -> None:
    """Raise StoreUnusable for folders of several mirrors, or for one copy twice."""
    names: dict[CopyId, str] = {}
    for copy in found:
        if copy.copy_id in names:
            raise StoreUnusable(
                f"{names[copy.copy_id]} and {copy.name} are one copy, {copy.copy_id.hex()}: one is a copy of the "
                "other; leave out the one that was copied",
                subject=copy.name,
            )
        names[copy.copy_id] = copy.name
    by_lake = {copy.listed.mirror_id: copy.name for copy in found if copy.listed is not None}
    if len(by_lake) > 1:
        raise StoreUnusable(f"these folders belong to different lakes: {', '.join(by_lake.values())}")


def _refuse(listed: CopyList, lost: dict[CopyId, str], absent: dict[str, str], without: frozenset[CopyId]) -> NoReturn:
    missing = {copy_id: reason for copy_id, reason in lost.items() if copy_id not in without}
    told = "; ".join(f"{listed.members[one].name} (copy {one.hex()}): {reason}" for one, reason in missing.items())
    failed = "".join(f"; {name} cannot be read: {reason}" for name, reason in absent.items())
    options = " ".join(f"--without {one.hex()}" for one in missing)
    raise StoreUnusable(
        f"of {len(listed.members)} copies of the names too few are here to know that none is newer: {told}{failed}; "
        f"bring the devices back, or, if they are lost for ever, start with: {options}; changes that only they hold "
        "are given up then",
        subject=", ".join(listed.members[one].name for one in missing),
    )
