"""A lake at 4+2 over six members with a head, names and their upkeep, in simulated time; for tests of the upkeep."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from engine.lake_upkeep.lake_upkeep import LakeUpkeep
from engine.process.embedded import EmbeddedEngine
from lakefs.ids import ChunkId, MemberId
from lakefs.wire import messages as m
from tests.head_rig import commit, head_over, store_blob
from tests.shards import Shard, drop, listed
from tests.store_rig import ask, run, session_of
from tests.unit.engine.cluster.stripe_rig import Rig, id_of, lake, payload_of

SMALL, LARGE = payload_of(1_000), payload_of(700_000, 1)


@dataclass
class Kept:
    """The lake, its upkeep, and a client of its head."""

    rig: Rig
    upkeep: LakeUpkeep
    client: EmbeddedEngine

    async def put(self, key: str, *payloads: bytes) -> bytes:
        """Put an object of these chunks; return its blob."""
        session = await session_of(self.client)
        blob = await store_blob(self.client, session, *payloads)
        await commit(self.client, session, key, blob)
        return blob

    async def ask(self, request: m.Request) -> dict[str, Any]:
        """Return the report that answers a request for upkeep."""
        report: dict[str, Any] = json.loads((await ask(self.client, request, m.ReportReply)).report_json)
        return report

    async def fsck(self, *, full: bool = False) -> dict[str, Any]:
        return await self.ask(m.RunFsck(full))

    async def status(self) -> dict[str, Any]:
        """Return the lake's part of the status, with the members asked anew."""
        found = await self.whole_status()
        return {**found["lake"], "disk": found["disk"]}

    async def whole_status(self) -> dict[str, Any]:
        """Return the status, with the members asked anew."""
        self.upkeep._status._asked_at = float("-inf")
        found: dict[str, Any] = json.loads((await ask(self.client, m.Status(), m.StatusReply)).status_json)
        return found

    async def holders(self, chunk: bytes) -> dict[int, MemberId]:
        """Return who has each shard of a chunk."""
        found: dict[int, MemberId] = {}
        for member, client in self.rig.members.clients.items():
            found |= {shard.number: member for shard in await listed(client) if shard.chunk == chunk}
        return found

    async def lose(self, chunk: bytes, *numbers: int) -> None:
        """Let shards of a chunk vanish from their members."""
        holders = await self.holders(chunk)
        for number in numbers:
            shard = Shard(ChunkId(chunk), number, b"")
            client = self.rig.members.clients[holders[number]]
            assert await drop(client, shard, touched=m.GENERATION_MAX, epoch=1 << 40) == [0]


def kept(body: Callable[[Kept], Awaitable[None]], count: int = 6) -> None:
    """Run a test with a lake and its upkeep, whose loops do not run."""

    async def main() -> None:
        async with lake("4+2", count) as rig, head_over(rig.stripes, rig.members, rig.upkeep_of) as made:
            client = made.client()
            try:
                await body(Kept(rig, made.names.upkeep, client))
            finally:
                rig.heal()
                await client.aclose()

    run(main)


def codes(report: dict[str, Any]) -> list[str]:
    """Return the codes of a report's findings."""
    return [finding["code"] for finding in report["findings"]]


def named(member: int) -> str:
    """Return a member as reports name it."""
    return f"member {id_of(member).hex()}"
