"""Requests about RDMA with odd values in every field, true ones among them, to an engine with a device."""

from __future__ import annotations

import os

import pytest

from lakefs.errors import InternalError, LakeError
from lakefs.limits import MIB
from lakefs.transport.fabric import Remote
from lakefs.wire import messages as m
from tests.fabric_liar import liar
from tests.fabric_rig import FabricWorld, Run
from tests.fuzz.requests import OddRequests, as_sent

SHAPES = (m.FabricOpen, m.LoadSlots, m.StoreSlots, m.PutSlots, m.Locate)
COUNT = 400


@pytest.mark.parametrize("seed", range(3))
def test_odd_requests_are_done_or_refused_and_leave_others_alone(seed: int, run: Run) -> None:
    async def body(world: FabricWorld) -> None:
        content = os.urandom(2 * MIB)
        (chunk,) = await world.warm(content)
        done = refused = 0
        async with liar(world) as client, liar(world) as other, world.lake("trio") as lake:
            await client.connect()
            await other.connect()
            odd = OddRequests(seed, SHAPES)
            session = (await client.engine.call(m.SessionOpen())).message
            for value in (client.named(), client.fabric.open_link(Remote.READ).end, session, [bytes(chunk)], MIB):
                odd.learn([value])
            for _ in range(COUNT):
                request = as_sent(odd.next()[0])
                if request is None:
                    continue
                try:
                    reply = await client.engine.call(request)
                except InternalError:
                    raise
                except LakeError:
                    refused += 1
                    continue
                reply.body.release()
                done += 1
            assert await lake.get("bkt/object") == content
            assert lake.rdma.chunks == 1
            assert bytes(other.memory) == bytes(MIB)
        assert done
        assert refused
        assert not world.held_bytes

    run(body)
