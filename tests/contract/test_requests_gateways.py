"""Notes of S3 gateways about themselves, on every kind of client: Status lists them while they are connected."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import trio

from lakefs.errors import InvalidArgument
from lakefs.limits import CONTROL_BYTES_MAX, GATEWAY_REASONS_MAX, GATEWAY_URL_CHARACTERS_MAX, GATEWAYS_LISTED_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.store_rig import ask, client_of, run, simulated_store

NOTE = m.NoteGateway("http://127.0.0.1:9000", 4711, True, 10, 6, {"new": 3, "changed": 1})


async def listed(client: EngineClient) -> list[dict[str, Any]]:
    found = json.loads((await ask(client, m.Status(), m.StatusReply)).status_json)["gateways"]
    assert isinstance(found, list)
    return found


def test_the_last_note_of_each_connection_is_listed(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        assert await listed(client) == []
        await ask(client, NOTE, m.Done)
        later = msgspec.structs.replace(NOTE, answers=20, repeated=15)
        await ask(client, later, m.Done)
        [found] = await listed(client)
        assert found.pop("peer")
        assert found == msgspec.structs.asdict(later)

    kind.run(body)


def test_a_gateway_is_listed_until_its_connection_ends(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        async with engine.connect() as gateway:
            if gateway is engine.client:
                pytest.skip("an engine in the process of its one client")
            await ask(gateway, msgspec.structs.replace(NOTE, process=2), m.Done)
            await ask(engine.client, NOTE, m.Done)
            assert [found["process"] for found in await listed(engine.client)] == [2, 4711]
        for _ in range(1000):  # the engine notices
            if len(found := await listed(engine.client)) == 1:
                break
            await trio.sleep(0.01)
        assert [gateway["process"] for gateway in found] == [4711]

    kind.run(body)


@pytest.mark.parametrize(
    "odd",
    [
        {"url": "x" * (GATEWAY_URL_CHARACTERS_MAX + 1)},
        {"url": "http://\x1b[31m"},
        {"url": "http://m\u00fcnchen:9000"},
        {"passed_on": {"x" * 33: 1}},
        {"passed_on": {"a\nb": 1}},
        {"passed_on": {str(number): 1 for number in range(GATEWAY_REASONS_MAX + 1)}},
        {"passed_on": {"new": -1}},
        {"answers": -1},
        {"repeated": -1},
        {"process": -1},
    ],
)
def test_a_note_that_no_gateway_sends_is_refused(odd: dict[str, Any]) -> None:
    async def main() -> None:
        async with simulated_store() as store:
            client = client_of(store)
            await ask(client, NOTE, m.Done)
            await refused(client, InvalidArgument, msgspec.structs.replace(NOTE, **odd))
            [found] = await listed(client)
            assert found["answers"] == NOTE.answers

    run(main)


def test_so_many_gateways_are_listed_as_one_answer_has_room_for() -> None:
    async def main() -> None:
        async with simulated_store() as store:
            most = (1 << 64) - 1
            reasons = {f"{number:_<32}": most for number in range(GATEWAY_REASONS_MAX)}
            longest = m.NoteGateway('"' * GATEWAY_URL_CHARACTERS_MAX, most, True, most, most, reasons)
            for _ in range(GATEWAYS_LISTED_MAX + 10):
                await ask(client_of(store), longest, m.Done)
            reply = await ask(client_of(store), m.Status(), m.StatusReply)
            assert len(json.loads(reply.status_json)["gateways"]) == GATEWAYS_LISTED_MAX
            assert len(reply.status_json) < CONTROL_BYTES_MAX

    run(main)
