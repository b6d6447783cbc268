"""Shards of chunks that nobody can make any more, as a cancelled put or a lost disk leaves them."""

from __future__ import annotations

import pytest

from engine.walker import membership
from lakefs.errors import PreconditionFailed
from lakefs.ids import ChunkKind, chunk_id_of, id_text
from lakefs.wire import messages as m
from tests.store_rig import ask
from tests.unit.engine.cluster.test_walker_pass import Running, running, small_rings
from tests.unit.engine.cluster.walker_rig import member_id, shards_of

__all__ = ["small_rings"]


def test_what_is_left_of_a_chunk_that_nobody_can_make_moves_home_and_keeps_no_older_table() -> None:
    """Else its partition were dirty for ever: gc frees a shard only where it is at home by every table."""

    async def scenario(one: Running) -> None:
        made = one.made
        payload = made.rng.randbytes(300_000)
        shards = shards_of(chunk_id_of(ChunkKind.DATA, payload), payload)
        for shard in shards[:2]:
            await made.put(made.home(shard), shard)
        for number in range(6, 8):
            await one.register(number)
            await made.start(member_id(number))
        for _ in range(6):
            await one.turn()
        assert len(made.whole_tables) == 1, "older tables are retired"
        assert len(await made.state.dirty()) == 1
        assert not one.walks.is_healed, "a stripe is short"
        for shard in shards[:2]:
            (holder,) = (await made.lists())[id_text(shard.chunk), shard.number]
            assert holder == made.home(shard)
        for shard in shards[:2]:
            await made.take(shard)
        await one.turn()
        assert one.walks.is_healed

    running(scenario)


def test_damaged_shards_that_nobody_needs_keep_no_drained_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie before a good one in its list, of which each page has one shard."""
    monkeypatch.setattr(membership, "_LOOKED_AT", 1)

    async def scenario(one: Running) -> None:
        made, leaving = one.made, member_id(1)
        await one.membership.drain(leaving)
        for _ in range(4):
            await one.turn()
        payload = made.rng.randbytes(300_000)
        left = shards_of(chunk_id_of(ChunkKind.DATA, payload), payload)
        for shard in left[:2]:
            await made.put(leaving, shard)
            await made.spoil(shard, leaving)
        await ask(made.clients[leaving], m.RunScrub(60.0, 0, restart=True), m.ReportReply)
        await made.put(leaving, left[4])
        with pytest.raises(PreconditionFailed, match="holds shards"):
            await one.membership.remove(leaving)
        await made.take(left[4], leaving)
        await one.membership.remove(leaving)

    running(scenario, 7)
