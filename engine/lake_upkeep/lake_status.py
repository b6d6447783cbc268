"""The lake's part of the status: members, what may be lost, walker, gc, scrub and quarantine, and room for content.

Rules kept here:
- It is read for each status, but members are asked anew only after MEMBERS_AGE_S: mounts ask it for `df`.
- *Outlives* counts the members that did not answer as lost, and speaks of stripes whose shards are at home: the
  walker's dirty partitions are said beside it.
- `scrub` and `segments` have the keys of one engine's, for the members that answered, with the bytes of all shards.
- *Healed* is said only by a walk that left no stripe, with no partition noted since (`engine.walker.walker_pass`), and
  not while a removed member has its places yet.
- A coordinator that cannot be asked is a reason in the report, never an error of the status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, Final

import msgspec
import trio

from engine.coordinator.lake_state import NO_EPOCH, LakeState
from engine.coordinator.records import (
    HeadRecord,
    MemberRecord,
    MemberState,
    OpeningRecord,
    SettingsRecord,
    shared_devices,
)
from engine.lake_gc.lake_gc import LakeGc
from engine.lake_upkeep.lake_scrub import LakeScrub
from engine.lake_upkeep.member_answers import Answers, ask_each
from engine.lake_upkeep.names_replicas import NamesReplicas
from engine.members.ports import Members
from engine.walker.membership import Membership
from engine.walker.walker_pass import WalkerPass
from lakefs.cluster.losses import losses_outlived
from lakefs.cluster.members import Level
from lakefs.errors import LakeError
from lakefs.ids import MemberId, id_text
from lakefs.ports import Clock
from lakefs.wire import messages as m

ANSWER_S: Final = 5.0
"""Within this a member answers, or counts as away."""
MEMBERS_AGE_S: Final = 5.0
_OF_SEGMENTS: Final = ("count", "allocated_bytes", "healed_reads", "damaged_chunks")
_OF_SCRUB: Final = ("state", "position", "damage_found")
_Statuses = dict[MemberId, dict[str, Any]]


class LakeStatus:
    """Reads the lake's part of the status.  Used on the loop."""

    def __init__(
        self,
        members: Members,
        state: LakeState,
        walks: WalkerPass,
        gc: LakeGc,
        scrub: LakeScrub,
        membership: Membership,
        clock: Clock,
        name: str = "",
        names_state: Callable[[], dict[str, Any]] = dict,
        etcd_state: Callable[[], dict[str, Any]] | None = None,
        replicas: NamesReplicas | None = None,
    ) -> None:
        self._members = members
        self._state = state
        self._walks = walks
        self._gc = gc
        self._scrub = scrub
        self._membership = membership
        self._clock = clock
        self._name = name
        self._names_state = names_state
        self._etcd_state = etcd_state
        self._replicas = replicas
        self._asking = trio.Lock()
        self._asked_at = float("-inf")
        self._statuses: _Statuses = {}
        self._away: dict[MemberId, str] = {}
        self._counts: dict[MemberId, int] = {}
        self._counted = NO_EPOCH
        """The ring epoch whose places were counted."""
        self._outlived: tuple[tuple[object, ...], dict[str, int]] = (), {}
        """Outlived losses, behind all that they depend on."""

    async def read(self) -> dict[str, Any]:
        """Return `lake`, `disk` (the room for content without parity), and `segments` and `scrub` of all members."""
        try:
            known = await self._state.members()
            lake = await self._state.lake()
            openings = await self._state.openings()
            settings = await self._state.settings() or SettingsRecord()
            heads = await self._state.heads()
            dirty = self._walks.many_dirty or len(await self._state.dirty())
            replicas = {} if self._replicas is None else await self._replicas.read()
        except LakeError as error:
            reason = f"the coordinator cannot be asked: {error.message}"
            return {"lake": {"name": self._name, "reason": reason, **self._etcd()}}
        records = [record for record in known if record.state is not MemberState.REMOVED]
        async with self._asking:
            if self._clock.monotonic() - self._asked_at >= MEMBERS_AGE_S:
                await self._ask([record.member for record in records])
        protection, devices = self._members.tables[0].protection, shared_devices(records)
        found = {
            "name": self._name,
            "id": "" if lake is None else id_text(lake.lake),
            "protection": str(protection),
            "ring_epoch": self._members.tables[0].ring_epoch,
            "ring_epochs": len(self._members.tables),
            "gc_generation": self._members.generation,
            "members": [self._member(record, devices, openings) for record in records],
            "removed": [id_text(record.member) for record in known if record.state is MemberState.REMOVED],
            "out_after_s": settings.out_after_s,
            "out_stops": settings.out_stops,
            "out_stopped_because": self._membership.stopped_because,
            "outlives": self._outlives(records),
            "walker": self._walker(dirty, records),
            "gc": {"running": self._gc.running, "last_ended_ns": self._gc.last_ended_ns, "last": self._last_gc()},
            "names": {**self._names_state(), **replicas},
            **self._etcd(),
            **self._heads(heads),
        }
        return {
            "disk": self._room(protection.data / protection.width),
            "segments": {name: self._sum("segments", name) for name in _OF_SEGMENTS},
            "scrub": self._scrub.merged({member: status["scrub"] for member, status in self._statuses.items()}),
            "lake": found,
        }

    # --- members -----------------------------------------------------------------------------------

    async def _ask(self, members: Iterable[MemberId]) -> None:
        answers: Answers[m.StatusReply] = await ask_each(
            self._members, dict.fromkeys(members, m.Status()), m.StatusReply, within_s=ANSWER_S
        )
        self._statuses = {
            member: msgspec.json.decode(message.status_json, type=dict[str, Any])
            for member, message in answers.messages.items()
        }
        self._away = answers.away
        self._asked_at = self._clock.monotonic()

    def _member(
        self, record: MemberRecord, devices: Mapping[MemberId, str], openings: Mapping[MemberId, OpeningRecord]
    ) -> dict[str, Any]:
        status = self._statuses.get(record.member, {})
        _, machine, *_ = (*record.domains, "", "")
        return {
            "id": id_text(record.member),
            "state": record.state.value,
            "up": self._is_up(record.member),
            "reason": self._away.get(record.member) or status.get("reason", ""),
            "machine": machine,
            "shared_device": devices.get(record.member, ""),
            "is_old": record.member in openings and openings[record.member].is_old,
            "addresses": list(record.addresses),
            "room_bytes": record.room_bytes,
            "places": self._places().get(record.member, 0),
            "used_bytes": _figure(status, "segments", "allocated_bytes"),
            "free_bytes": _figure(status, "disk", "free_bytes"),
            "damaged_chunks": _figure(status, "segments", "damaged_chunks"),
            "scrub": _scrub_of(status),
        }

    def _is_up(self, member: MemberId) -> bool:
        """Return True if a member answered when it was asked last, and was not found away since."""
        return member in self._statuses and self._members.is_up(member)

    def _places(self) -> Mapping[MemberId, int]:
        """Return the number of shards' homes that each member is, by the newest table."""
        table = self._members.tables[0]
        if self._counted != table.ring_epoch:
            width = table.protection.width
            counts = Counter(chain.from_iterable(row[:width] for row in table.rows))
            self._counts = {table.members[index].id: count for index, count in counts.items()}
            self._counted = table.ring_epoch
        return self._counts

    def _outlives(self, records: Iterable[MemberRecord]) -> dict[str, int]:
        """Return how many more devices and machines may be lost; -1: content cannot be read now.

        Members whose records name one device are lost together.
        """
        table = self._members.tables[0]
        away = {member.id for member in table.members if not self._is_up(member.id)}
        devices = shared_devices(records)
        known = table.ring_epoch, away, devices
        if self._outlived[0] != known:
            by_device = [replace(member, machine=devices.get(member.id, member.id.hex())) for member in table.members]
            found = {
                "devices": losses_outlived(replace(table, members=tuple(by_device)), Level.MACHINE, away),
                "machines": losses_outlived(table, Level.MACHINE, away),
            }
            self._outlived = known, found
        return self._outlived[1]

    def _room(self, share: float) -> dict[str, int]:
        """Return free and total bytes of the members that answered, as far as they are for content."""
        return {name: int(share * self._sum("disk", name)) for name in ("free_bytes", "total_bytes")}

    def _sum(self, part: str, name: str) -> int:
        """Return the sum of a figure over the members that answered."""
        return sum(_figure(status, part, name) or 0 for status in self._statuses.values())

    # --- walker, gc, names -------------------------------------------------------------------------

    def _walker(self, dirty: int, records: Iterable[MemberRecord]) -> dict[str, Any]:
        """Return the walker's state, with the partitions that are noted now."""
        found = self._walks.status()
        placed = {member.id for member in self._members.tables[0].members}
        is_whole = not dirty and placed <= {record.member for record in records}
        return {**found, "healed": bool(found["healed"]) and is_whole, "dirty_partitions": dirty}

    def _etcd(self) -> dict[str, Any]:
        """Return the part about the lake's etcd; empty without one."""
        return {} if self._etcd_state is None else {"etcd": self._etcd_state()}

    def _heads(self, heads: Iterable[HeadRecord]) -> dict[str, Any]:
        """Return the part about the processes that serve clients; empty without an etcd: nobody knows them then."""
        if self._etcd_state is None:
            return {}
        listed = sorted(heads, key=lambda head: (head.host, head.machine, head.since_ns))
        return {"heads": [msgspec.structs.asdict(head) for head in listed]}

    def _last_gc(self) -> dict[str, Any] | None:
        return None if self._gc.last is None else gc_report(asdict(self._gc.last))


def gc_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report of gc with an entry for each member's id, as commands print it."""
    members = {each["member"]: {k: v for k, v in each.items() if k != "member"} for each in report["members"]}
    return {**report, "members": members}


def _scrub_of(status: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the part of a member's scrub that its entry has; None if the member did not answer."""
    scrub = status.get("scrub")
    return scrub and {"ended_ns": scrub["last_pass"]["ended_ns"], **{name: scrub[name] for name in _OF_SCRUB}}


def _figure(status: Mapping[str, Any], part: str, name: str) -> int | None:
    """Return a figure of a member's status; None if it is not known."""
    figure = status.get(part, {}).get(name)
    return figure if isinstance(figure, int) else None
