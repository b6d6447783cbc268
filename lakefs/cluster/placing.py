"""Makes tables: the first of a lake, and the next of each epoch from the last.

A row keeps the homes that it has, at their places, unless they must go.  In this order, each step as far as those
before it allow:

1. Members that are draining, out or gone lose their places.
2. No row changes more than m homes in one epoch (one without parity), unless `at_once`: while shards move, k of
   them are still where the last table has them.  The next table, made from this one, changes the rest.
3. No domain is over its limits (`lakefs.cluster.domains`).
4. No load is over 1.10 of its share, none far below it (`lakefs.cluster.balance`).
5. Nothing else moves.

Empty places are filled along the ring: by members under their share, else under 1.10 of it, else by any that fits.
Members that were accepted always get a table.  The same arguments give the same table, on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations

from lakefs.cluster.balance import even_out
from lakefs.cluster.draft import Draft
from lakefs.cluster.members import Member, Standing, checked_members
from lakefs.cluster.protection import Protection
from lakefs.cluster.ring import vnode_room
from lakefs.cluster.table import NO_MEMBER, Row, Table
from lakefs.errors import InvalidArgument
from lakefs.ids import RingEpoch
from lakefs.limits import MANY_MEMBERS, PARTITION_BITS, PARTITION_BITS_MANY

FIRST_EPOCH = RingEpoch(1)


def first_table(protection: Protection, members: Iterable[Member], *, accept_loss: bool = False) -> Table:
    """Return the table of a new lake; InvalidArgument as `checked_members` says."""
    ordered = checked_members(protection, members, accept_loss=accept_loss)
    bits = _partition_bits(ordered)
    draft = Draft(protection, ordered, bits, vnode_room(ordered), changes_max=protection.width)
    _fill(draft)
    even_out(draft, low_percent=99, high_percent=101)
    return _finished(draft, FIRST_EPOCH, ordered, vnode_room(ordered))


def next_table(last: Table, members: Iterable[Member], *, at_once: bool = False, accept_loss: bool = False) -> Table:
    """Return the table of the next epoch, for `members`; call again with the same ones until no row changes.

    `at_once` lets more than m homes of a row change in one epoch.

    InvalidArgument, beside what `checked_members` refuses: more than m homes of a row are out, or lose their places and
    not `at_once`.
    """
    ordered = checked_members(last.protection, members, accept_loss=accept_loss)
    _check_lost(last, ordered, at_once=at_once)
    protection = last.protection
    bits = max(last.partition_bits, _partition_bits(ordered))
    unit = vnode_room(ordered, last.vnode_room_bytes)
    changes_max = protection.width if at_once else max(1, protection.parity)
    draft = Draft(protection, ordered, bits, unit, changes_max)
    _keep(draft, last, ordered)
    _drop(draft)
    _fill(draft)
    even_out(draft)
    return _finished(draft, RingEpoch(last.ring_epoch + 1), ordered, unit)


def _partition_bits(members: Sequence[Member]) -> int:
    placing = sum(member.state is Standing.IN for member in members)
    return PARTITION_BITS_MANY if placing >= MANY_MEMBERS else PARTITION_BITS


def _check_lost(last: Table, members: Sequence[Member], *, at_once: bool) -> None:
    """Refuse to take more than m homes of a row away at once, or to call more than m of them out."""
    width, most = last.protection.width, last.protection.parity
    states = {member.id: member.state for member in members}
    gone = [states.get(member.id) is not Standing.IN for member in last.members]
    out = [states.get(member.id) is Standing.OUT for member in last.members]
    if any(out) and (worst := max(sum([out[index] for index in row[:width]]) for row in last.rows)) > most:
        raise InvalidArgument(
            f"{worst} homes of one row would be out, and protection {last.protection} outlives {most}: wait for a "
            "member to return, or remove members that are lost for ever"
        )
    if at_once or not any(gone):
        return
    if (worst := max(sum([gone[index] for index in row[:width]]) for row in last.rows)) > max(1, most):
        raise InvalidArgument(
            f"{worst} homes of one row would lose their places, and {max(1, most)} may in one epoch: "
            "drain or remove fewer members at once"
        )


def _keep(draft: Draft, last: Table, members: Sequence[Member]) -> None:
    """Give each member that gets places those that it had; each partition begins with the row of its parent."""
    index_of = {member.id: index for index, member in enumerate(members) if member.state is Standing.IN}
    now = [index_of.get(member.id, NO_MEMBER) for member in last.members]
    split = len(draft.rows) // len(last.rows)
    for number in range(len(draft.rows)):
        for column, before in enumerate(last.rows[number // split][: last.protection.width]):
            if now[before] != NO_MEMBER:
                draft.keep(number, column, now[before])
    draft.begin()


def _drop(draft: Draft) -> None:
    """Empty places over the limits of their domains, those of the fullest members first, as few as possible."""
    limits = draft.domains.limits
    for number, row in enumerate(draft.rows):
        if all(places <= limits[domain] for domain, places in draft.counts(number).items()):
            continue
        columns = [column for column, member in enumerate(row) if member != NO_MEMBER]
        columns.sort(key=lambda column: (draft.load[row[column]] / draft.shares[row[column]], column))
        counts: dict[int, int] = {}
        over = []
        for column in columns:
            if draft.fits(counts, row[column]):
                draft.add(counts, row[column])
            else:
                over.append(column)
        for column in reversed(over):
            if draft.may_change(number, column):
                draft.vacate(number, column)


def _fill(draft: Draft) -> None:
    """Fill all empty places."""
    for number, row in enumerate(draft.rows):
        vacant = [column for column, member in enumerate(row) if member == NO_MEMBER]
        if not vacant:
            continue
        counts = draft.counts(number)
        found: list[int] = []
        for caps in (draft.goal, draft.bound):
            if len(found) < len(vacant):
                found += draft.walk(number, len(vacant) - len(found), counts, caps)
        while len(found) < len(vacant):
            more = draft.walk(number, len(vacant) - len(found), counts, None)
            assert more, "limits of nested domains leave room for a whole row"
            found += more
        _seat(draft, number, vacant, found)


def _seat(draft: Draft, number: int, vacant: list[int], found: list[int]) -> None:
    """Give each of the empty places a member, so that members have as much of one column as of another."""
    data = draft.protection.data
    columns = sorted(vacant, key=lambda column: (0 < column < data, column))
    seated: list[int] = []
    for column in columns:
        seated.append(min(found, key=lambda member: (draft.column_share(column, member), member)))
        found.remove(seated[-1])
    for one, other in combinations(range(len(columns)), 2):
        stays = draft.column_share(columns[one], seated[one]) + draft.column_share(columns[other], seated[other])
        swaps = draft.column_share(columns[one], seated[other]) + draft.column_share(columns[other], seated[one])
        if swaps < stays:
            seated[one], seated[other] = seated[other], seated[one]
    for column, member in zip(columns, seated, strict=True):
        draft.fill(number, column, member)


def _finished(draft: Draft, ring_epoch: RingEpoch, members: tuple[Member, ...], vnode_room_bytes: int) -> Table:
    rows: list[Row] = [(*row, *draft.substitutes(number)) for number, row in enumerate(draft.rows)]
    bits = len(rows).bit_length() - 1
    return Table(ring_epoch, draft.protection, members, tuple(rows), bits, vnode_room_bytes)
