"""The operator of a simulated lake drains, adds, replaces, checks, collects; and devices lose content for ever."""

from __future__ import annotations

import json
from typing import Final

import trio

from engine.format.layouts import Table, unpack_chunk_record
from engine.format.shards import is_whole
from engine.lake_upkeep.member_answers import member_text
from engine.segments.files import segment_path
from lakefs.errors import InvalidArgument, LakeError
from lakefs.findings import Finding
from lakefs.ids import MemberId
from lakefs.wire import messages as m
from tests.sim.cluster.lake import SimLake, until
from tests.sim.cluster.places import MemberPlace

CHECKS_MAX: Final = 4
"""Checks that find damage at one member: what nothing refers to is not mended."""


class Operator:
    """Each method is an event: it returns when the lake has done what it was asked for."""

    def __init__(self, lake: SimLake) -> None:
        self._lake = lake

    async def lose_device(self) -> None:
        """Lose a member's device for ever; an empty one comes back as a new member."""
        lake = self._lake
        found = [place for place in lake.members if place.id is not None and not lake.health.hurt.get(place.name)]
        found = [place for place in found if lake.health.may_lose(place.name)]
        if not found:
            return
        place = lake.rng.choice(found)
        await self._lose(place)

    async def _lose(self, place: MemberPlace) -> None:
        assert place.id is not None
        lost = place.id
        self._lake.health.begin(place.name)
        self._lake.health.lost.add(place.name)
        self._lake.lost.add(lost)
        self._lake.met["lost"] += 1
        self._lake.log(f"{place.name} loses its device")
        lives = place.lives
        place.is_wanted = False
        place.lose()
        await trio.sleep(self._lake.rng.choice((0.5, 15.0, 40.0)))
        place.is_wanted = True
        await until(lambda: place.is_up and place.lives > lives and place.id is not None)
        await self.remove_lost(lost)
        self._lake.health.end(place.name)

    async def remove_lost(self, lost: MemberId) -> None:
        """Tell the lake that a member is lost for ever, until it has heard it."""
        await self.tell(m.ChangeMember(lost, m.MEMBER_REMOVE, accept_loss=True), "remove the lost member")
        self._lake.lost.discard(lost)

    async def rot(self) -> None:
        """Flip bits of shards on a member's medium, and have the lake checked."""
        place = self._lake.victim()
        if place is None or not place.is_up or place.store is None or place.disk.is_dead:
            return
        places = self._shard_places(place)
        if not places or not self._lake.health.may_lose(place.name):
            return
        self._lake.health.begin(place.name)
        self._lake.health.lost.add(place.name)
        self._lake.met["rot"] += 1
        self._lake.log(f"bits flip on {place.name}")
        for path, offset in self._lake.rng.sample(places, min(len(places), 3)):
            place.disk.flip_bit(path, offset, self._lake.rng.randrange(8))
        await trio.sleep(self._lake.rng.choice((1.0, 10.0)))
        await self._check(place)
        self._lake.health.end(place.name)

    async def _check(self, place: MemberPlace) -> None:
        """Have the lake check every shard, until it has reached this member, and once more if it found damage."""
        member = place.id
        mended = 0
        while member is not None and place.id == member and mended < CHECKS_MAX:
            reply = await self.tell(m.RunFsck(True), "check every shard")
            assert isinstance(reply, m.ReportReply)
            listed = json.loads(reply.report_json)["findings"]
            found = {finding["code"] for finding in listed if finding["object"].startswith(member_text(member))}
            if not found & {Finding.MEMBER_UNCHECKED.code, Finding.SHARD_DAMAGED.code}:
                return  # also one that is out was asked: it may be a home again
            mended += Finding.SHARD_DAMAGED.code in found  # a disk that takes no writes keeps no note of it
            await trio.sleep(5.0)

    def _shard_places(self, place: MemberPlace) -> list[tuple[str, int]]:
        """Return where the first byte of each shard is on a member's medium."""
        store = place.store
        assert store is not None
        kinds = store.segments.register.kinds
        with store.metadata.view() as view:
            records = [
                unpack_chunk_record(value) for key, value in view.scan(Table.CHUNKS, b"", b"\xff") if not is_whole(key)
            ]
        return [(segment_path(found.segment, kinds[found.segment]), found.offset) for found in records]

    async def drain(self) -> None:
        """Drain a member, or make one that is drained a new one."""
        place = self._lake.victim()
        if place is None or place.id is None or len(self._lake.members) < self._lake.world.protection.members_min + 2:
            return
        member = place.id
        self._lake.met["drain"] += 1
        await self.ask_once(m.ChangeMember(member, m.MEMBER_DRAIN), f"drain {place.name}")

    async def add_member(self) -> None:
        """Add a member on a new host."""
        if len(self._lake.members) >= self._lake.world.protection.width + 3:
            return
        place = MemberPlace(self._lake.world, len(self._lake.members))
        self._lake.members.append(place)
        self._lake.met["added"] += 1
        self._lake.log(f"{place.name} is added")
        self._lake.keep(place)

    async def collect(self) -> None:
        """Collect garbage now."""
        self._lake.met["gc asked for"] += 1
        await self.ask_once(m.RunGc(), "gc")

    async def check(self) -> None:
        """Check the whole lake beside everything else."""
        self._lake.met["fsck asked for"] += 1
        await self.ask_once(m.RunFsck(self._lake.rng.random() < 0.3), "fsck")

    async def tell(self, request: m.Request, what: str) -> m.Message | None:
        """Send a request of the operator to the lake until it is answered; None if it knows no such member."""
        while True:
            try:
                head = self._lake.rng.choice(self._lake.heads)
                async with head.connect() as client:
                    await client.call(m.Hello(1, "operator"))
                    reply = await client.call(request)
                    reply.body.release()
                    self._lake.log(f"operator: {what}: done")
                    return reply.message
            except InvalidArgument:
                return None  # it was lost before the lake had heard of it
            except LakeError as error:
                self._lake.log(f"operator: {what}: {error!r}")
            await trio.sleep(5.0)

    async def ask_once(self, request: m.Request, what: str) -> None:
        """Ask the lake for something once, whatever becomes of it."""
        try:
            async with self._lake.rng.choice(self._lake.heads).connect() as client:
                await client.call(m.Hello(1, "operator"))
                (await client.call(request)).body.release()
                self._lake.log(f"operator: {what}: done")
        except LakeError as error:
            self._lake.log(f"operator: {what}: {error!r}")
