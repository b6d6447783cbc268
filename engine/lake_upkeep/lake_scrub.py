"""Scrub over a lake: each member's own, all at once, as one pass.

Rules kept here:
- A pass ends when each member that answers has ended its own.  One that has is not asked to begin another meanwhile; so
  a request goes on with the members that are left.  This is in memory: names that start again begin a pass anew.
- A member that does not answer is not waited for: the report names it, as not checked.
- Partitions of damaged shards are noted as dirty, when a request asks for the damage: the walker makes them anew.
- Requests take turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import trio

from engine.coordinator.lake_state import LakeState
from engine.lake_upkeep.damaged_shards import note_damaged
from engine.lake_upkeep.member_answers import ask_each, member_text, present_members, report_in, unchecked
from engine.members.ports import Members
from engine.upkeep.scrub import Totals
from lakefs.ids import MemberId, id_text
from lakefs.wire import messages as m

_SUMS: Final = ("checked_chunks", "checked_bytes", "damage_found", "quarantined_chunks", "rate_bytes_per_s")
_SUMS_OF_LAST: Final = ("chunks", "checked_bytes", "damage_found")
_SUMS_SINCE_START: Final = tuple(each.name for each in fields(Totals))
Reports = Mapping[MemberId, dict[str, Any]]


class LakeScrub:
    """The scrub of one lake.  Used on the loop."""

    def __init__(self, members: Members, state: LakeState) -> None:
        self._members = members
        self._state = state
        self._ended: set[MemberId] = set()
        """Members that have ended their part of this pass."""
        self._passes = 0
        self._lock = trio.Lock()

    async def run(self, request: m.RunScrub) -> dict[str, Any]:
        """Continue the pass at each member for `for_s` seconds, and report.  Errors of the coordinator."""
        passes = self._passes
        async with self._lock:
            if self._passes > passes and request.for_s:
                request = m.RunScrub(0.0, request.rate_bytes_per_s, damaged=request.damaged)
            if request.restart and request.for_s:
                self._ended.clear()
            present = [record.member for record in await present_members(self._state)]
            only_report = m.RunScrub(damaged=request.damaged)
            requests = {member: only_report if member in self._ended else request for member in present}
            answers = await ask_each(self._members, requests, m.ReportReply)
            reports = {member: report_in(message) for member, message in sorted(answers.messages.items())}
            if request.for_s:
                self._note_ended(reports)
            done = self._passes > passes
            report = self.merged(reports)
        report["members"] = {id_text(member): found for member, found in reports.items()}
        report |= {"done": done, "unchecked": unchecked(answers.away)}
        if request.damaged:
            report["damaged"] = [item for member, found in reports.items() for item in _damaged(member, found)]
            table = self._members.tables[0]
            await note_damaged(self._state, table, [item["chunk"] for item in report["damaged"]])
        return report

    def merged(self, reports: Reports) -> dict[str, Any]:
        """Return one report of these members' reports, in the form that each of them has (`Scrubber.status`)."""
        each = [*reports.values()]
        lasts = [report["last_pass"] for report in each]
        last = {name: sum(one[name] for one in lasts) for name in _SUMS_OF_LAST}
        last |= {name: min((one[name] for one in lasts), default=0) for name in ("began_ns", "ended_ns")}
        began = [report["pass_began_ns"] for report in each if report["pass_began_ns"]]
        positions = [1.0 if one in self._ended else found["position"] for one, found in reports.items()]
        states = {report["state"] for report in each}
        sums: dict[str, Any] = {name: sum(report[name] for report in each) for name in _SUMS}
        return sums | {
            "state": next((state for state in ("running", "paused") if state in states), "idle"),
            "position": round(sum(positions) / max(1, len(positions)), 4),
            "pass_began_ns": min(began, default=0),
            "passes": min((report["passes"] for report in each), default=0),
            "last_pass": last,
            "since_start": {
                name: sum(report["since_start"].get(name, 0) for report in each) for name in _SUMS_SINCE_START
            },
        }

    def _note_ended(self, reports: Reports) -> None:
        self._ended.update(member for member, report in reports.items() if report["done"])
        if self._ended.issuperset(reports):
            self._passes += 1
            self._ended.clear()


def _damaged(member: MemberId, report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a member's quarantine; a shard belongs to the member, as far as it knows."""
    name = member_text(member)
    return [{**item, "member": id_text(member), "objects": item["objects"] or [name]} for item in report.pop("damaged")]
