"""A lake moves from one coordinator to another: from a table of the names to an etcd, and back.

                source                      destination
    1.          in charge                   MOVING, with the lake's id: another lake's is refused
    2.          LEAVING                     MOVING                              nobody changes the source any more
    3.          LEAVING                     MOVING, with all keys that last
    4.          LEAVING                     SERVES, as a new incarnation        from here on the lake is there
    5.          LEFT, and for where         SERVES

Each coordinator says so in one key (`ChargeRecord`), with a turn that grows with each move.  In charge is the one that
says so with the higher turn; so a crash at any point leaves one.  Another try goes on behind 4, and begins anew before.

Rules kept here:
- Copied is what lasts (`engine.coordinator.lasting`).  What else the destination held is removed.
- The destination is filled by transactions that compare its record, and serves only when what both hold is the same.
- While the names' processes move a lake they serve nothing.  Processes elsewhere have a fence at the coordinator
  (`engine.coordinator.fenced_coordinator`), which 2 closes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from engine.coordinator.coordinator import (
    END,
    NO_LEASE,
    Coordinator,
    Delete,
    Entry,
    HasRevision,
    HasValue,
    IsAbsent,
    Operation,
    Put,
)
from engine.coordinator.lasting import BEGIN, batches, entries_of, lasting
from engine.coordinator.records import CHARGE_KEY, Charge, ChargeRecord, decode, encode
from lakefs.errors import EngineBusy, PreconditionFailed, StoreUnusable
from lakefs.ids import new_id16

COPIES_MAX: Final = 3
"""Times that everything is copied before a source that others change is given up."""


class Side(NamedTuple):
    """A coordinator, and the words for where it is, as errors and the other one say them."""

    coordinator: Coordinator
    place: str


async def charge_of(coordinator: Coordinator) -> ChargeRecord | None:
    """Return a coordinator's part in its lake; None if it has none.  StoreUnusable for a later release's."""
    entry = await _charge_entry(coordinator)
    return None if entry is None else decode(ChargeRecord, entry.value)


async def take_charge(coordinator: Coordinator, lake: bytes) -> None:
    """Let a coordinator that has never moved say that it is in charge of a lake; durable on return."""
    first = ChargeRecord(lake, Charge.SERVES, 0, new_id16())
    await coordinator.transact([IsAbsent(CHARGE_KEY)], [Put(CHARGE_KEY, encode(first))])


async def move(source: Side, destination: Side, lake: bytes) -> ChargeRecord:
    """Let a lake's coordinator be the destination; returns its record, durably in charge.  Safe to repeat.

    PreconditionFailed where the destination holds keys of another lake, or of none; StoreUnusable when the source is
    not in charge (any more); EngineBusy when others change it.  Errors of both coordinators.
    """
    left, entry = await _charge_entry(source.coordinator), await _charge_entry(destination.coordinator)
    here, there = _of_lake(left, lake, source), _of_lake(entry, lake, destination)
    if there is not None and _is_ahead(there, here):
        served = await _served_again(destination, there)
        if here is not None:
            await _leave(source, here, served, destination.place)
        return served
    refuse_unless_in_charge(here, lake, source.place)
    assert here is not None, "it is in charge"
    if there is None and (await destination.coordinator.range(BEGIN, END, limit=1)).entries:
        raise PreconditionFailed(
            f"{destination.place} holds keys of no known lake; remove them, or choose another name",
            subject=destination.place,
        )
    moving = type(here)(lake, Charge.MOVING, here.turn + 1, new_id16())
    await _change(destination, entry, moving)
    here = await _closed(source, here)
    await _copy(source, destination, moving)
    served = msgspec.structs.replace(moving, state=Charge.SERVES)
    await _change(destination, moving, served)
    await _leave(source, here, served, destination.place)
    return served


def refuse_other_lake(found: ChargeRecord, lake: bytes, place: str) -> None:
    """Raise PreconditionFailed if a coordinator's record is another lake's."""
    if found.lake != lake:
        raise PreconditionFailed(
            f"{place} holds another lake, {found.lake.hex()}, not {lake.hex()}; choose another name", subject=place
        )


def refuse_unless_in_charge(found: ChargeRecord | None, lake: bytes, place: str, incarnation: bytes = b"") -> None:
    """Raise StoreUnusable unless a coordinator's record says that it is in charge of a lake.

    `incarnation` is the known one; empty: it is not compared.
    """
    if found is None:
        raise StoreUnusable(
            f"{place} holds nothing of this lake: it came back empty, or is another one; bring the right one back",
            subject=place,
        )
    if found.lake != lake:
        raise StoreUnusable(f"{place} holds another lake, {found.lake.hex()}, not {lake.hex()}", subject=place)
    if not found.is_in_charge:
        raise StoreUnusable(_not_in_charge(found, place), subject=place)
    if incarnation and found.incarnation != incarnation:
        raise StoreUnusable(
            f"{place} holds this lake as it was moved there another time ({found.incarnation.hex()}, not "
            f"{incarnation.hex()}); bring the right one back",
            subject=place,
        )


# --- steps of a move ---------------------------------------------------------------------------------


def _is_ahead(record: ChargeRecord, other: ChargeRecord | None) -> bool:
    """Return True if a record's coordinator is in charge, and not the other one's."""
    return record.is_in_charge and (other is None or not other.is_in_charge or record.turn > other.turn)


def _of_lake(entry: Entry | None, lake: bytes, side: Side) -> ChargeRecord | None:
    """Return the record in an entry.  PreconditionFailed for another lake's."""
    record = None if entry is None else decode(ChargeRecord, entry.value)
    if record is not None:
        refuse_other_lake(record, lake, side.place)
    return record


def _not_in_charge(record: ChargeRecord, place: str) -> str:
    if record.state is Charge.LEFT:
        return f"the lake's coordinator is not {place} any more, but {record.place}"
    return f"the lake's coordinator is only being moved to {place}: start the lake where its names are"


async def _served_again(side: Side, record: ChargeRecord) -> ChargeRecord:
    """Return the record of a coordinator in charge, which takes changes again if it did not."""
    served = msgspec.structs.replace(record, state=Charge.SERVES)
    if served != record:
        await _change(side, record, served)
    return served


async def _closed(side: Side, record: ChargeRecord) -> ChargeRecord:
    """Return the record of a coordinator in charge, which takes no changes any more."""
    closed = msgspec.structs.replace(record, state=Charge.LEAVING)
    if closed != record:
        await _change(side, record, closed)
    return closed


async def _leave(side: Side, record: ChargeRecord, served: ChargeRecord, place: str) -> None:
    """Let a coordinator say that another one is in charge."""
    left = msgspec.structs.replace(served, state=Charge.LEFT, place=place)
    if left != record:
        await _change(side, record, left)


async def _change(side: Side, known: ChargeRecord | Entry | None, record: ChargeRecord) -> None:
    """Replace a record.  EngineBusy if somebody else has."""
    if known is None:
        compare: IsAbsent | HasValue | HasRevision = IsAbsent(CHARGE_KEY)
    elif isinstance(known, Entry):
        compare = HasRevision(CHARGE_KEY, known.revision)
    else:
        compare = HasValue(CHARGE_KEY, encode(known))
    if not (await side.coordinator.transact([compare], [Put(CHARGE_KEY, encode(record))])).succeeded:
        raise EngineBusy(f"another process moves the lake's coordinator: {side.place} was changed", subject=side.place)


async def _copy(source: Side, destination: Side, moving: ChargeRecord) -> None:
    """Let the destination hold what lasts of the source, and nothing else but its own record."""
    for _ in range(COPIES_MAX):
        wanted = await lasting(source.coordinator)
        surplus: list[Operation] = []
        missing = dict(wanted)
        async for entry in entries_of(destination.coordinator):
            if entry.key not in wanted and entry.key != CHARGE_KEY:
                surplus.append(Delete(entry.key))
            elif entry.lease == NO_LEASE and wanted.get(entry.key) == entry.value:
                del missing[entry.key]
        for batch in batches([*surplus, *(Put(key, value) for key, value in missing.items())]):
            if not (await destination.coordinator.transact([HasValue(CHARGE_KEY, encode(moving))], batch)).succeeded:
                raise EngineBusy(f"another process moves the lake's coordinator to {destination.place}")
        is_same = wanted == await lasting(destination.coordinator) == await lasting(source.coordinator)
        if is_same:
            return
    raise EngineBusy(f"{source.place} is changed while it is copied: stop the lake on its other machines")


async def _charge_entry(coordinator: Coordinator) -> Entry | None:
    return (await coordinator.get(CHARGE_KEY)).entry
