"""fsck over a lake: is every named blob there, and is every store in order?

    members    each member's own check of its store, all at once; what it finds is named by the member
    names      the names' own store: index, journal, names, versions, uploads, spaces of keyed values
    content    every blob that names refer to, against the members (`content_check`)
    shards     the same for each other names shard, where it is led
    deep       full only: the walker compares the shards of all named chunks with what they have to be
    garbage    shards of chunks that nothing refers to

Rules kept here:
- *Damage* is content that cannot be read as it was, by bucket and key, and a store whose records or files are.  A
  damaged or missing shard of a chunk that can be read is a note: the walker makes it anew.  So is garbage.
- What could not be checked is said: a member that did not answer, by its id and reason, unless it is out and no table
  gives it a place; chunks that only such members can tell of; and a names shard that could not be asked, without which
  garbage is not counted.  It is never damage.
- It changes nothing but what members' own checks change, and notes for the walker; the deep walk repairs.
- One check at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import trio

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import MemberState
from engine.format.group_parts import FIRST_SHARD
from engine.fsck.report import Report
from engine.lake_upkeep.damaged_shards import note_damaged
from engine.lake_upkeep.garbage_count import count_garbage
from engine.lake_upkeep.member_answers import member_text, present_members, reports_of, unchecked
from engine.lake_upkeep.names_fsck import FsckParts, NamesFsck
from engine.lake_upkeep.other_shards import NO_OTHER_SHARDS, OtherShards
from engine.members.ports import Members, Stripes
from engine.store.names_store import NamesStore
from engine.walker.member_openings import partitions_with
from engine.walker.walker import Walker
from engine.walker.walker_report import WalkReport
from lakefs.cluster.erasure import ErasureCode
from lakefs.errors import LakeError, StaleEpoch
from lakefs.findings import Finding
from lakefs.ids import MemberId, NamesShard, Partition
from lakefs.wire import messages as m

_WALKS_MAX: Final = 3
"""Walks of one partition, when tables change meanwhile."""
_COUNTED: Final = ("shards", "payload_bytes")
"""Counts of members that are added up in the report."""


class LakeFsck:
    """The check of one lake.  Used on the loop."""

    def __init__(
        self,
        members: Members,
        state: LakeState,
        stripes: Stripes,
        names: NamesStore,
        code: ErasureCode,
        walker: Walker,
        others: OtherShards = NO_OTHER_SHARDS,
    ) -> None:
        """`names`: those of names shard 0; `others` has the ones of all further shards."""
        self._members = members
        self._state = state
        self._walker = walker
        self._others = others
        self._parts = FsckParts(members, state, stripes, names.metadata, code)
        self._lock = trio.Lock()

    async def run(self, *, full: bool) -> dict[str, Any]:
        """Check everything, and return the report as `lake fsck --json` prints it.  Errors of the coordinator."""
        async with self._lock:
            return await _LakeCheck(self, full=full).run()


class _LakeCheck:
    """One check."""

    def __init__(self, fsck: LakeFsck, *, full: bool) -> None:
        self._fsck = fsck
        self._members = fsck._members
        self._full = full
        self._report = Report("full" if full else "quick")
        self._names = NamesFsck(fsck._parts, self._report, full=full, has_spaces=True)
        self._content = self._names.content
        self._others: list[dict[str, Any]] = []
        """Reports of other shards."""
        self._unasked: dict[NamesShard, str] = {}
        """Other shards that were not checked, with the reasons."""

    async def run(self) -> dict[str, Any]:
        states = {record.member: record.state for record in await present_members(self._fsck._state)}
        away = await self._check_members(states)
        await self._names.look()
        for shard in range(FIRST_SHARD + 1, await self._fsck._state.names_shards()):
            await self._check_shard(NamesShard(shard))
        if self._full:
            await self._walk_deep(states)
        await self._names.name_damaged()
        if short := self._content.short_count + sum(report["short"] for report in self._others):
            message = f"shards of {short} chunks are not at their homes; the walker makes them whole"
            self._report.found("lake", Finding.STRIPE_SHORT, message)
        await self._report_garbage(sorted(states.keys() - away.keys()))
        missed = self._unchecked(self._away_at_shards() | self._names.looks.away | away, states)
        return self._report.as_json() | {"unchecked": missed}

    # --- other names shards --------------------------------------------------------------------------

    async def _check_shard(self, shard: NamesShard) -> None:
        """Have another shard checked, and take what was found; one that cannot be asked is noted."""
        try:
            checked = await self._fsck._others.check(shard, self._full)
        except LakeError as error:
            self._unasked[shard] = error.message
            return
        self._report.take(checked.report)
        self._content.named.add_all(checked.named)
        self._others.append(checked.report)

    def _away_at_shards(self) -> dict[MemberId, str]:
        """Return the members that did not answer to leaders of other shards."""
        return {MemberId(bytes.fromhex(member)): reason for r in self._others for member, reason in r["away"].items()}

    # --- members -----------------------------------------------------------------------------------

    async def _check_members(self, asked: Iterable[MemberId]) -> dict[MemberId, str]:
        """Have each member check its store; returns the reasons of those that did not."""
        reports, away = await reports_of(self._members, asked, m.RunFsck(self._full))
        self._report.count("members", len(reports))
        for what in _COUNTED:
            self._report.count(what, sum(found["checked"].get(what, 0) for found in reports.values()))
        for member, found in reports.items():
            self._take(member, found)
        findings = [finding for found in reports.values() for finding in found["findings"]]
        damaged = [finding["object"] for finding in findings if _is_of_shard(finding)]
        await note_damaged(self._fsck._state, self._members.tables[0], damaged)
        return away

    def _take(self, member: MemberId, found: Mapping[str, Any]) -> None:
        """Take a member's findings; damage of shards is a note."""
        name = member_text(member)
        listed = found["findings"]
        for finding in listed:
            subject = f"{name}: {finding['object']}"
            if _is_of_shard(finding):
                self._report.found(subject, Finding.SHARD_DAMAGED, f"{finding['message']} ({finding['code']})")
            else:
                self._report.add({**finding, "object": subject})
        more = found["damage"] + found["notes"] - len(listed)
        if more > 0:
            has_damage = any(finding["severity"] == "damage" and not _is_of_shard(finding) for finding in listed)
            kind = Finding.STORE_DAMAGED if has_damage else Finding.SHARD_DAMAGED
            self._report.found(name, kind, f"{more} more findings, which its report does not list")

    def _unchecked(self, away: Mapping[MemberId, str], states: Mapping[MemberId, MemberState]) -> list[dict[str, str]]:
        """Return what could not be checked; it is among the findings, too."""
        for member, reason in away.items():
            self._report.found(member_text(member), Finding.MEMBER_UNCHECKED, reason)
        needed = {
            member: reason
            for member, reason in away.items()
            if states.get(member) is not MemberState.OUT or partitions_with(self._members.tables, member)
        }
        missed = [*unchecked(needed)]
        for shard, reason in self._unasked.items():
            told = f"{reason}; garbage was not counted, since its names may refer to it"
            missed.append({"object": _shard_text(shard), "reason": told})
        if count := self._content.unknown_count + sum(report["unknown"] for report in self._others):
            missed.append(
                {"object": "lake", "reason": f"{count} chunks cannot be judged without members that did not answer"}
            )
        return missed

    # --- deep walk, garbage ------------------------------------------------------------------------

    async def _walk_deep(self, states: Mapping[MemberId, MemberState]) -> None:
        """Have the walker compare, and mend, the shards of all named chunks."""
        total = WalkReport()
        out = {member for member, state in states.items() if state is MemberState.OUT}
        for partition in self._content.named.partitions(self._members.tables[0].partition_bits):
            report = await self._walk_one(partition, [*states], out)
            if report is not None:
                total.add(report)
        if total.replaced:
            message = f"{total.replaced} shards had other bytes than their chunks give them, and were replaced"
            self._report.found("lake", Finding.SHARD_DAMAGED, message)
        self._report.count("chunks_walked", total.checked)

    async def _walk_one(self, partition: Partition, others: list[MemberId], out: set[MemberId]) -> WalkReport | None:
        for _ in range(_WALKS_MAX):
            try:
                walked = await self._fsck._walker.walk([partition], others=others, out=out, deep=True)
                return walked.reports[partition]
            except StaleEpoch:
                await trio.sleep(1.0)  # until this process has the newer table
        return None

    async def _report_garbage(self, members: Iterable[MemberId]) -> None:
        if not self._content.named.is_complete or self._unasked:
            return
        generation = await self._fsck._walker.generation()
        garbage = await count_garbage(self._members, members, self._content.named, generation)
        has_damage = self._names.has_damage or any(report["has_damage"] for report in self._others)
        told = "nothing that can be read; gc keeps them" if has_damage else "nothing; gc frees them"
        if garbage.shards:
            message = (
                f"{garbage.shards} shards ({garbage.size_bytes} bytes) are of chunks that are referred to by {told}"
            )
            self._report.found("lake", Finding.GARBAGE, message)
        if garbage.damaged:
            message = f"{garbage.damaged} damaged shards are of chunks that are referred to by {told}"
            self._report.found("lake", Finding.GARBAGE, message)


def _shard_text(shard: NamesShard) -> str:
    """Return a names shard as reports name it."""
    return f"names shard {shard}"


def _is_of_shard(finding: Mapping[str, str]) -> bool:
    """Return True for damage of a shard: reports name it by its chunk, a slash and its number."""
    return finding["severity"] == "damage" and finding["object"][:2] in ("c:", "m:") and "/" in finding["object"]
