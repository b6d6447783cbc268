"""Requests for upkeep at the names of a lake: gc, fsck and scrub over all its members, and changes of members."""

from __future__ import annotations

import json
from typing import Any, Final

from engine.coordinator.lake_state import LakeState
from engine.coordinator.records import SettingsRecord
from engine.lake_gc.lake_gc import LakeGc
from engine.lake_upkeep.lake_fsck import LakeFsck
from engine.lake_upkeep.lake_scrub import LakeScrub
from engine.lake_upkeep.lake_status import gc_report
from engine.lake_upkeep.member_answers import present_members, reports_of
from engine.lake_upkeep.names_replicas import NamesReplicas
from engine.members.ports import Members
from engine.requests.handlers import handles
from engine.requests.upkeep import check_scrub
from engine.walker.membership import Membership
from lakefs.errors import InvalidArgument
from lakefs.ids import MemberId, id_text
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply

_OF_MEMBERS: Final = ("freed_chunks", "removed_segments", "disk_bytes_after")
"""Figures of members' own gc: the report has their sums, and each member's; None for one that did not answer."""


class LakeUpkeepRequests:
    """Handlers of requests for the upkeep of a lake."""

    def __init__(
        self,
        state: LakeState,
        members: Members,
        gc: LakeGc,
        fsck: LakeFsck,
        scrub: LakeScrub,
        membership: Membership,
        replicas: NamesReplicas | None = None,
    ) -> None:
        self._state = state
        self._members = members
        self._gc = gc
        self._fsck = fsck
        self._scrub = scrub
        self._membership = membership
        self._replicas = replicas

    @handles(m.RunGc)
    async def _run_gc(self, request: m.RunGc) -> Reply:
        """Free shards, then have each member collect its own whole chunks, and give room back."""
        report = gc_report((await self._gc.run()).as_json())
        asked = [record.member for record in await present_members(self._state)]
        own, away = await reports_of(self._members, asked, m.RunGc(request.compact))
        report |= {name: sum(found[name] for found in own.values()) for name in _OF_MEMBERS}
        for member in asked:
            of_member = report["members"].setdefault(id_text(member), {})
            of_member |= {name: own.get(member, {}).get(name) for name in _OF_MEMBERS}
            of_member["not_collected_because"] = away.get(member, "")
        return _reply(report)

    @handles(m.RunFsck)
    async def _run_fsck(self, request: m.RunFsck) -> Reply:
        return _reply(await self._fsck.run(full=request.full))

    @handles(m.RunScrub)
    async def _run_scrub(self, request: m.RunScrub) -> Reply:
        check_scrub(request)
        return _reply(await self._scrub.run(request))

    @handles(m.ChangeMember)
    async def _change_member(self, request: m.ChangeMember) -> Reply:
        member = MemberId(request.member)
        if request.change == m.MEMBER_DRAIN:
            await self._membership.drain(member)
        elif request.change == m.MEMBER_REMOVE:
            await self._membership.remove(member, accept_loss=request.accept_loss)
        elif request.change == m.NAMES_REMOVE:
            await self._remove_replica(request.member)
        else:
            raise InvalidArgument(f"there is no change {request.change} of members")
        return Reply(m.Done())

    @handles(m.SetLake)
    async def _set_lake(self, request: m.SetLake) -> Reply:
        if request.out_after_s and not m.OUT_AFTER_S_MIN <= request.out_after_s <= m.OUT_AFTER_S_MAX:
            raise InvalidArgument(f"out-after is {m.OUT_AFTER_S_MIN} to {m.OUT_AFTER_S_MAX} seconds")
        if request.out_stops and request.out_stops not in m.OUT_STOPS:
            raise InvalidArgument(f"out-stops is one of {', '.join(m.OUT_STOPS)}, not {request.out_stops!r}")
        await self._state.change_settings(
            lambda known: SettingsRecord(request.out_after_s or known.out_after_s, request.out_stops or known.out_stops)
        )
        return Reply(m.Done())

    async def _remove_replica(self, replica: bytes) -> None:
        if self._replicas is None:
            raise InvalidArgument("the names of a lake without etcd have no replicas")
        await self._replicas.remove(replica)


def _reply(report: dict[str, Any]) -> Reply:
    return Reply(m.ReportReply(json.dumps(report)))
