"""Decides which list of good copies counts, and if the copies that are there may be opened.  Pure.

Rules kept here:
- A list counts unless one of its copies is there and has a list that did not come from it.  Then it was never durable
  on all its copies, so nobody was answered by it.  Of those that count, the one is chosen that no other came from.
- More than half of the copies that the list names must be there.
- A copy that was made, and never got its first list, says nothing against a list that names it: it was whole before
  that list was first written.
- `without` is an operator's word: these copies are not waited for, and count as lost.  It raises the list's term, so
  that what they hold is stale if they return.  Of two lists that both count, the one of the higher term is right; of
  equal terms, two operators have let both sides go on, and neither is opened.
- A folder whose `mirror.copy` has another inode than its list says was copied.  It does not count, and its list says
  nothing against others, unless the caller says that it was restored.

Why no copy that lacks an answer opens by itself.  An answer is given under a list N that all its copies have.  Others
could open without all of these by an older list, or by one that was never finished:
- An older list: N leaves out at most half of its copies (`engine.mirror.good_copies`), or of those of a list between
  them that more than half of its copies have (`engine.mirror.mirror_opening`).  So one of more than half knows better.
- An unfinished list U: who wrote it did not know N, nor the other way round, so both came from one list.  If more than
  half of U's copies are here and none is N's, then one of them never had U, and says so.  For else those that had it
  were away when N's process opened, with more than half of the list that both came from; and there are not enough.
- A list whose copies contradict it is overwritten by the one that was chosen, before the next.  Otherwise unfinished
  lists could lie on all copies, each contradicted by another, until nobody has the one that answers were given under.
`tests/models/mirrored_disks.py` goes through all orders of vanishing, returning, crashing, adding and replacing, with
up to three copies, and shows for each of the rules how a stale copy opens without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from engine.mirror.copy_list import CopyList
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
    behind: frozenset[CopyId]
    """Copies used that do not have this list: an older one, one that does not count, or none yet."""
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
    listed = _counting(found, absent, without, restored)
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
    behind = frozenset(copy_id for copy_id in used if not _has(here[copy_id], listed))
    stale = tuple(copy.name for copy in found if copy.copy_id not in listed.members)
    return Choice(listed, used, behind, eligible, lost, stale, bool(without & listed.members.keys()))


def _counting(
    found: Sequence[FoundCopy], absent: dict[str, str], without: frozenset[CopyId], restored: bool
) -> CopyList:
    """Return the list that counts."""
    lists = {copy.listed.tag: copy.listed for copy in found if copy.listed is not None}
    counting = [
        one
        for one in lists.values()
        if not any(_speaks_against(one, copy, restored) for copy in found) and not one.members.keys() <= without
    ]
    newest = [one for one in counting if not any(other is not one and other.came_from(one) for other in counting)]
    if not newest:
        told = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise StoreUnusable(f"no folder has a list of good copies that can be used ({told or 'none was given'})")
    term = max(one.term for one in newest)
    newest = [one for one in newest if one.term == term]
    if len(newest) > 1:
        told = "; ".join(f"{copy.name} (copy {copy.copy_id.hex()})" for copy in found if copy.listed in newest)
        raise StoreUnusable(
            f"these copies went on without each other, and hold different changes: {told}; choose one side, and start "
            "with --without ID for each copy of the other: what only those hold is given up"
        )
    return newest[0]


def _speaks_against(one: CopyList, copy: FoundCopy, restored: bool) -> bool:
    """Return True if this copy shows that the list, which names it, was never durable on it."""
    member = one.members.get(copy.copy_id)
    if member is None or copy.listed is None or (member.inode != copy.inode and not restored):
        return False
    return not copy.listed.came_from(one)


def _has(copy: FoundCopy, listed: CopyList) -> bool:
    return copy.listed is not None and copy.listed.tag == listed.tag


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
