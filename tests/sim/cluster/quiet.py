"""The end of a history: all faults have ended, and everything has to be whole, tidy and where it belongs."""

from __future__ import annotations

import json
from typing import Any

import trio

from engine.coordinator.lake_state import LakeState
from engine.format.layouts import Table, chunk_id_of_key
from engine.format.shards import is_whole, shard_of_key
from engine.keyed.spaces import iter_spaces, list_spaces
from engine.lake_upkeep.member_answers import member_text
from lakefs.client.trio.lake import TrioLake
from lakefs.cluster.erasure import ErasureCode
from lakefs.cluster.members import Standing
from lakefs.cluster.table import Table as ClusterTable
from lakefs.content.manifest import CutKind, build
from lakefs.findings import Finding
from lakefs.ids import ChunkId, MemberId, data_chunk_id
from lakefs.lake.multipart import UploadName
from lakefs.wire import messages as m
from tests.sim.cluster.bucket_customers import BucketRegisters
from tests.sim.cluster.customers import Customer
from tests.sim.cluster.lake import SimLake, until
from tests.sim.cluster.places import MEMBER_BYTES, MemberPlace
from tests.sim.cluster.promises import RESTS_S, Content, Promises
from tests.sim.judges.history import SimFailure
from tests.sim.world.offload import SimOffload

HEALS_S = 300.0
"""The lake says that it is healed so soon."""
CYCLES = 4
FULL_PASS_S_MAX = 1000.0
"""A lake that goes through everything more seldom is not waited for."""
_LOST_BY_LIES = {
    finding.code
    for finding in (
        *(Finding.CHUNK_QUARANTINED, Finding.CONTENT_CHUNK_DAMAGED, Finding.CHUNK_PAST_END),
        Finding.CHECKPOINT_DAMAGED,
    )
}
"""A disk that lied about syncs may have lost these: a value of a key, and a checkpoint beside a whole journal."""
Where = dict[tuple[ChunkId, int], list[MemberId]]


class Quiet:
    """The last checks of a world."""

    def __init__(self, lake: SimLake, promises: Promises, buckets: BucketRegisters | None = None) -> None:
        self._lake = lake
        self._names = lake.names
        self._members = lake.members
        self._heads = lake.heads
        self._promises = promises
        self._buckets = buckets

    async def end(self, reader: Customer) -> None:
        """End all faults, wait, and check everything."""
        lake = self._lake
        lake.world.network.heal()
        lake.names.heal()
        for member in lake.members:
            member.disk.capacity_bytes = MEMBER_BYTES
        await trio.sleep(RESTS_S)
        await until(lambda: lake.is_all_up)
        await self.wait_healed()
        lake.health.was_hurt.clear()
        lake.log("healed")
        if self._buckets is not None:
            await self._buckets.end(lake.heads[0], self._promises, lake.world.new_random(), lake.log)
            await self._abort_uploads()
        await self.check_spaces()  # members learn of removed ones, if they were away then
        await self._let_values_go()
        await self.collect()
        await lake.names.settle()
        await until(lambda: lake.is_all_up)
        await self.wait_healed()
        await self.check_spaces()
        for head in lake.heads:
            async with reader.at(head):
                await self.check(reader)

    async def _abort_uploads(self) -> None:
        """Abort uploads that customers left, so that nothing refers to their parts."""
        offload = SimOffload(self._lake.world.new_random(), slowest_s=0.0)
        async with self._heads[0].connect() as client:
            lake = TrioLake(client, offload, network=True)
            for bucket in sorted(self._promises.buckets):
                for entry in [entry async for entry in lake.uploads(f"{bucket}/")]:
                    self._lake.met["uploads aborted"] += 1
                    await lake.abort_upload(UploadName(bucket, entry.key, entry.upload))

    async def wait_healed(self) -> None:
        """Wait until the lake says that it is healed."""
        with trio.move_on_after(HEALS_S) as bound:
            while not await self._lake.is_healed():  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(2.0)
        if bound.cancelled_caught:
            raise SimFailure(f"the lake is not healed in {HEALS_S:g} s: {await self._state()}")

    async def _state(self) -> str:
        upkeep = self._names.upkeep
        if upkeep is None:
            return "no names"
        state = LakeState(upkeep._coordinator)
        dirty = [(note.partition, note.epoch, note.is_moving) for note in await state.dirty()]
        records = {record.member.hex()[:6]: record.state.value for record in await state.members()}
        tables = [(t.ring_epoch, [member.id.hex()[:6] for member in t.members]) for t in upkeep._members.tables]
        present = {place.name: (place.id or b"").hex()[:6] for place in self._members if place.is_up}
        return f"dirty {dirty}, members {records}, tables {tables}, up {present}, {upkeep.walks.status()}"

    async def ask(self, request: m.Request) -> dict[str, Any]:
        """Return the report of gc or fsck."""
        async with self._heads[0].connect() as client:
            await client.call(m.Hello(1, "quiet"))
            reply = await client.call(request)
            assert isinstance(reply.message, m.ReportReply)
            found: dict[str, Any] = json.loads(reply.message.report_json)
            return found

    async def collect(self) -> None:
        """Collect garbage until everything that nothing refers to is gone."""
        for cycle in range(CYCLES):
            report = await self.ask(m.RunGc())
            kept = {name: told["kept_because"] for name, told in report["members"].items() if told.get("kept_because")}
            if kept and cycle:
                raise SimFailure(f"gc of a quiet lake is kept from collecting: {kept}")

    async def check_spaces(self) -> None:
        """Check that members have the spaces that names have, and no other."""
        async with self._heads[0].connect() as client:
            await client.call(m.Hello(1, "quiet"))
            reply = await client.call(m.SpaceList())
            assert isinstance(reply.message, m.Spaces)
            wanted = {(space.name, space.number) for space in reply.message.spaces}
        assert self._names.upkeep is not None
        keepers = {one.id for one in self._names.upkeep._members.tables[0].members if one.state is Standing.IN}
        for place in self._members:
            assert place.store is not None
            if place.id not in keepers:
                continue  # it is drained, and keeps no keys any more
            with place.store.metadata.view() as view:
                found = {(space.name, space.number) for space in list_spaces(view)}
            if not found <= wanted:
                raise SimFailure(f"{place.name} has the spaces {found}, and the lake has {wanted}")

    async def _let_values_go(self) -> None:
        """Wait until members have removed the values of removed spaces: until then gc keeps them, and later they are
        garbage."""
        with trio.move_on_after(HEALS_S) as bound:
            while any(map(self._has_removed_spaces, self._members)):  # noqa: ASYNC110 - on a clock that jumps
                await trio.sleep(1.0)
        if bound.cancelled_caught:
            raise SimFailure(f"values of removed spaces are still there after {HEALS_S:g} s")

    def _has_removed_spaces(self, place: MemberPlace) -> bool:
        if place.store is None:
            return False
        with place.store.metadata.view() as view:
            return any(record.removed for _, record in iter_spaces(view))

    async def check(self, reader: Customer) -> None:
        """Check everything."""
        for name in sorted(self._promises.keys):
            if not await reader.read(name):
                raise SimFailure(f"{name} cannot be read from a quiet lake")
        vague = [name for name, key in self._promises.keys.items() if len(key.may_be) != 1]
        if vague:
            raise SimFailure(f"{vague} have several contents")
        bound = {key.may_be[0] for key in self._promises.keys.values()}
        contents = {content for content in bound if content is not None}
        await self._let_full_pass(contents)
        self._check_places(contents)
        report = await self.ask(m.RunFsck(True))
        found = [finding for finding in report["findings"] if not self._is_forgotten(finding)]
        if found or report["unchecked"]:
            raise SimFailure(f"fsck of a quiet lake: {found} {report['unchecked']}")
        self._check_places(contents)

    def _is_forgotten(self, finding: dict[str, Any]) -> bool:
        """Return True if a finding is about what a member's disk forgot though it had synced it."""
        members = map(member_text, self._lake.forgetful)
        return finding["code"] in _LOST_BY_LIES and any(finding["object"].startswith(member) for member in members)

    async def _let_full_pass(self, contents: set[Content]) -> None:
        """Wait for a walk through everything while shards lie elsewhere that are not missing at their homes.

        A put that ended after it stored shards at substitutes, and before it noted that, leaves them there.
        """
        every_s = self._lake.world.settings.walks.full_pass_s
        until_s = trio.current_time() + every_s + HEALS_S
        while self._has_unnoted(contents) and every_s <= FULL_PASS_S_MAX and trio.current_time() < until_s:
            self._lake.met["waited for the full pass"] += 1
            await trio.sleep(every_s / 10)
            await self.wait_healed()
            await self.collect()

    def _has_unnoted(self, contents: set[Content]) -> bool:
        table, expected = self._expected(contents)
        for (chunk, number), members in self.shards().items():
            home = table.homes(chunk)[number]
            is_missing = (chunk, number) in expected and home not in members
            if not is_missing and any(member != home for member in members):
                return True
        return False

    def _expected(self, contents: set[Content]) -> tuple[ClusterTable, Where]:
        """Return the one table that is left, and where the shards of these contents belong."""
        upkeep = self._names.upkeep
        assert upkeep is not None
        (table,) = upkeep._members.tables
        code = ErasureCode(table.protection.data, table.protection.parity)
        expected: Where = {}
        for content in contents:
            for chunk, length in chunks_of(content):
                homes = table.homes(chunk)
                for number in code.shards(length):
                    expected[chunk, number] = [homes[number]]
        return table, expected

    def _check_places(self, contents: set[Content]) -> None:
        """Check that each shard of what is named is at its home, and nothing else is anywhere."""
        _, expected = self._expected(contents)
        found = self.shards()
        if found == expected:
            return
        kinds = {
            "missing": {key for key in expected if key not in found},
            "garbage": {key for key in found if key not in expected},
            "elsewhere": {key for key in expected if key in found and found[key] != expected[key]},
        }
        told = [
            f"{what}: {sorted((chunk.hex()[:10], number) for chunk, number in keys)[:6]} ({len(keys)})"
            for what, keys in kinds.items()
            if keys
        ]
        raise SimFailure(f"shards of a quiet lake: {'; '.join(told)}")

    def shards(self) -> Where:
        """Return where each shard is, from the members' own records."""
        found: Where = {}
        for place in self._members:
            if place.store is None or place.id is None:
                continue
            with place.store.metadata.view() as view:
                for key, _ in view.scan(Table.CHUNKS, b"", b"\xff"):
                    if not is_whole(key):
                        found.setdefault((chunk_id_of_key(key), shard_of_key(key)), []).append(place.id)
        return found


def chunks_of(content: Content) -> list[tuple[ChunkId, int]]:
    """Return the chunks of an object with their lengths, manifests too."""
    chunks = [(data_chunk_id(payload), len(payload)) for payload in content]
    tree = build(CutKind.PARTS, chunks)
    return [*chunks, *((chunk, len(payload)) for chunk, payload in tree.manifests)]
