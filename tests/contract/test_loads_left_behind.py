"""Loads into lent memory whose client leaves in the middle: nothing is written to the memory after that."""

from __future__ import annotations

import pytest

from engine.memory import while_lent
from engine.segments import lent_reader
from engine.sessions.references import Client
from lakefs.errors import SessionLost
from lakefs.limits import KIB, MIB
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_loads import POOL, Pool, payload_of, pool_of
from tests.contract.test_requests_memory import on_a_socket

SIZES = {"small": 5000, "granules": 300 * KIB, "large": MIB}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("is_cached", [True, False], ids=["cached", "cold"])
def test_nothing_is_written_once_the_client_has_left(
    kind: Kind, size: int, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_cached:
        monkeypatch.setattr(lent_reader, "_may_be_cached", lambda *_: False)
    monkeypatch.setattr(lent_reader, "_PARALLEL_READS", 1)
    monkeypatch.setattr(while_lent, "ASK_EVERY_S", -1.0)
    chunk_count = 6
    questions = 0

    async def load_until(pool: Pool, chunks: list[bytes], leaves_at: int) -> bool:
        """Load; the client leaves at a question.  Returns False if there were fewer."""
        nonlocal questions
        questions = 0
        seen: list[bytes] = []

        def check_its_memory(self: Client) -> None:
            nonlocal questions
            questions += 1
            if questions >= leaves_at:
                seen.append(pool.at(0, POOL))
                raise SessionLost("the client has left")

        with monkeypatch.context() as patched:
            patched.setattr(Client, "check_its_memory", check_its_memory)
            try:
                await pool.load(chunks, [index * 2 * MIB for index in range(chunk_count)])
            except SessionLost:
                assert seen[0] == pool.at(0, POOL)
                return True
        assert not seen
        return False

    async def body(engine: Engine) -> None:
        async with pool_of(engine) as pool:
            chunks = await pool.store(*(payload_of(size, seed) for seed in range(chunk_count)))
            leaves_at = 1
            while await load_until(pool, chunks, leaves_at):
                leaves_at += 1
            assert leaves_at > (2 if is_cached and size == SIZES["small"] else chunk_count), "it asks before each write"
            assert all(pool.at(index * 2 * MIB, size) == payload_of(size, index) for index in range(chunk_count))

    on_a_socket(kind, body)
