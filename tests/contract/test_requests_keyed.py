"""Requests about keyed blobs: each key has its own answer, and the first value stays; on every kind of client."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest

from engine.keyed.spaces import KEYED_PART_CHARGE
from engine.keyed.values import Values
from lakefs.errors import (
    ERROR_TABLE,
    ChunkDamaged,
    ChunkNotFound,
    EngineBusy,
    InvalidArgument,
    InvalidName,
    KeyNotFound,
    RequestTooLarge,
    SessionLost,
    SourceChanged,
    SpaceNotFound,
    StoreFull,
)
from lakefs.ids import data_chunk_id
from lakefs.limits import CHUNK_BYTES, KEYED_QUOTA_BYTES_MIN, MIB
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import KEYED, KINDS, Engine, Kind, every
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_memory import lent, memory_of
from tests.store_rig import ask, fsck, gc, read, records, session_of, store_chunks

CODES = {row.error: row.wire_code for row in ERROR_TABLE}
SMALL, MIDDLE, LARGE = b"a value", b"b" * 65_536, bytes(range(256)) * 5000


@pytest.fixture(params=every(KEYED))
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


async def space_of(client: EngineClient, name: str = "space", **settings: int) -> int:
    request = m.SpaceOpen(name, settings.get("quota_bytes"), settings.get("ttl_s"))
    return (await ask(client, request, m.SpaceStat)).number


async def stat_of(client: EngineClient, name: str = "space") -> m.SpaceStat:
    return await ask(client, m.SpaceOpen(name, create=False), m.SpaceStat)


async def put_keys(
    client: EngineClient, space: int, values: Mapping[bytes, Sequence[bytes]], *, resize: bool = False
) -> m.KeyedOutcomes:
    """Put values, given as their parts, in a body."""
    parts = [part for value in values.values() for part in value]
    counts = [len(value) for value in values.values()]
    request = m.KeyedPut(space, list(values), counts, [len(part) for part in parts], resize=resize)
    return await ask(client, request, m.KeyedOutcomes, *parts)


async def value_of(client: EngineClient, space: int, key: bytes) -> bytes | None:
    """Read a value through the engine."""
    matched = await ask(client, m.KeyedMatch(space, [key]), m.KeyedMatched)
    assert len(matched.chunks) == len(matched.lengths) == sum(matched.counts)
    parts = [await read(client, chunk) for chunk in matched.chunks]
    assert [len(part) for part in parts] == matched.lengths
    return b"".join(parts) if matched.counts[0] else None


async def check_keepers(engine: Engine) -> None:
    """Check the engines that keep keys: usage, expiries and chunks are those of the values."""
    for keeper in await engine.keepers():
        report = await fsck(keeper)
        assert (report["damage"], report["notes"]) == (0, 0)


async def collected(engine: Engine) -> int:
    """Run gc at each engine that keeps keys; return how many chunks were freed."""
    return sum([(await gc(keeper))["freed_chunks"] for keeper in await engine.keepers()])


def codes(failures: Sequence[m.Failure | None]) -> list[int]:
    return [0 if failure is None else failure.wire_code for failure in failures]


def test_spaces_are_opened_listed_changed_and_removed(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await refused(client, SpaceNotFound, m.SpaceOpen("llama/tp2", create=False))
        number = await space_of(client, "llama/tp2", quota_bytes=KEYED_QUOTA_BYTES_MIN, ttl_s=60)
        other = await space_of(client, "another")
        assert number != other
        assert await space_of(client, "llama/tp2", quota_bytes=1 << 40) == number
        stat = await stat_of(client, "llama/tp2")
        assert (stat.quota_bytes, stat.ttl_s, stat.entries, stat.value_bytes) == (1 << 40, 60, 0, 0)
        listed = await ask(client, m.SpaceList(), m.Spaces)
        assert [space.name for space in listed.spaces] == ["another", "llama/tp2"]
        await put_keys(client, number, {b"k": [SMALL]})
        await ask(client, m.SpaceRemove("llama/tp2"), m.Done)
        await refused(client, SpaceNotFound, m.SpaceRemove("llama/tp2"))
        for request in (m.KeyedMatch(number, [b"k"]), m.KeyedRemove(number, [b"k"]), m.KeyedMatch(1 << 40, [])):
            await refused(client, SpaceNotFound, request)
        await refused(client, SpaceNotFound, m.KeyedPut(number, [b"k"], [1], [1]), [b"x"])
        again = await space_of(client, "llama/tp2")
        assert again not in (number, other)
        assert await value_of(client, again, b"k") is None

    kind.run(body)


def test_a_space_is_opened_when_the_store_is_full(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: Engine) -> None:
        client, store = engine.client, engine.store
        if store is None:
            return
        space = await space_of(client, quota_bytes=1 << 40)

        def refuse() -> None:
            raise StoreFull("planted")

        monkeypatch.setattr(store.metadata, "_refuse_without_room", refuse)
        assert await space_of(client) == await space_of(client, quota_bytes=1 << 40) == space
        await refused(client, StoreFull, m.SpaceOpen("new"))
        await refused(client, StoreFull, m.SpaceOpen("space", 1 << 41))

    kind.run(body)


@pytest.mark.parametrize("name", ["", "a\nb", "n" * 201, "\x7f"])
def test_names_that_no_space_has_are_refused(kind: Kind, name: str) -> None:
    async def body(engine: Engine) -> None:
        await refused(engine.client, InvalidName, m.SpaceOpen(name))
        await refused(engine.client, InvalidName, m.SpaceRemove(name))
        await refused(engine.client, InvalidArgument, m.SpaceOpen("s", quota_bytes=KEYED_QUOTA_BYTES_MIN - 1))
        await refused(engine.client, InvalidArgument, m.SpaceOpen("s", ttl_s=-1))

    kind.run(body)


def test_values_are_put_once_and_found(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client)
        values = {b"1": [SMALL], b"2" * 64: [MIDDLE, SMALL, LARGE], b"\0": [LARGE]}
        assert await put_keys(client, space, values) == m.KeyedOutcomes([m.KEYED_STORED] * 3)
        for key, parts in values.items():
            assert await value_of(client, space, key) == b"".join(parts)
        changed = {b"1": [b"other"], b"\0": [LARGE], b"4": [b"new"]}
        assert await put_keys(client, space, changed) == m.KeyedOutcomes(
            [m.KEYED_PRESENT, m.KEYED_PRESENT, m.KEYED_STORED]
        )
        assert await value_of(client, space, b"1") == SMALL
        stat = await stat_of(client)
        size = sum(len(part) for parts in values.values() for part in parts) + 3
        assert (stat.entries, stat.value_bytes) == (4, size)
        if engine.store is not None:
            assert engine.store.keyed.counts.differed == 1
        other = await space_of(client, "other")
        assert await value_of(client, other, b"1") is None
        await check_keepers(engine)

    kind.run(body)


def test_a_key_that_comes_twice_has_its_first_value(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        space = await space_of(engine.client)
        keys = [b"k", b"", b"k", b"", b"x" * 65]
        request = m.KeyedPut(space, keys, [1] * 5, [5, 1, 6, 1, 1])
        answer = await ask(engine.client, request, m.KeyedOutcomes, b"first", b"a", b"second", b"b", b"c")
        assert answer.outcomes == [m.KEYED_STORED, m.KEYED_FAILED, m.KEYED_PRESENT, m.KEYED_FAILED, m.KEYED_FAILED]
        assert codes(answer.failures) == [0, 1, 0, 1, 1]
        assert await value_of(engine.client, space, b"k") == b"first"

    kind.run(body)


@pytest.mark.parametrize("space", [-1, 0, 1 << 32, 7])
def test_a_space_that_never_was_is_refused_in_every_request(kind: Kind, space: int) -> None:
    async def body(engine: Engine) -> None:
        client, keys = engine.client, [b"k"]
        for request in (
            m.KeyedMatch(space, keys),
            m.KeyedRemove(space, keys),
            m.KeyedCommit(await session_of(client), space, [], [], []),
            m.NoteReads([], space, keys),
        ):
            await refused(client, SpaceNotFound, request)
        await refused(client, SpaceNotFound, m.KeyedPut(space, keys, [1], [1]), [b"x"])
        assert await ask(client, m.NoteReads([], space), m.Done) == m.Done()

    kind.run(body)


def test_a_bad_key_fails_by_itself_in_every_request(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client)
        await put_keys(client, space, {b"k": [SMALL]})
        keys = [b"", b"k", b"x" * 65, b"gone"]
        matched = await ask(client, m.KeyedMatch(space, keys), m.KeyedMatched)
        assert matched.counts == [0, 1, 0, 0]
        assert codes(matched.failures) == [1, 0, 1, 0]
        assert matched.chunks == [data_chunk_id(SMALL)]
        removed = await ask(client, m.KeyedRemove(space, [*keys, b"k"]), m.KeyedOutcomes)
        assert removed.outcomes == [0, m.KEYED_REMOVED, 0, m.KEYED_ABSENT, m.KEYED_ABSENT]
        assert codes(removed.failures) == [1, 0, 1, 0, 0]
        assert (await stat_of(client)).entries == 0

    kind.run(body)


def test_lists_that_do_not_fit_each_other_are_refused(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client)
        for counts, lengths, depths in (([], [1], []), ([2], [1], []), ([-1, 2], [1], []), ([1], [1], [0, 0])):
            keys = [b"k"] * max(1, len(counts))
            await refused(client, InvalidArgument, m.KeyedPut(space, keys, counts, lengths, depths), [b"x"])
        await refused(client, InvalidArgument, m.KeyedPut(space, [b"k"], [1], [2]), [b"x"])
        await refused(client, InvalidArgument, m.KeyedPut(space, [b"k"], [1], [1]))
        await refused(client, RequestTooLarge, m.KeyedMatch(space, [b"k"] * 4097))
        await refused(client, RequestTooLarge, m.KeyedRemove(space, [b"k"] * 4097))
        answer = await ask(
            client, m.KeyedPut(space, [b"a", b"b"], [1, 1], [1, 1], [65_536, 65_535]), m.KeyedOutcomes, b"xy"
        )
        assert answer.outcomes == [m.KEYED_FAILED, m.KEYED_STORED]
        assert await ask(client, m.KeyedPut(space, [b"none"], [0], []), m.KeyedOutcomes) == m.KeyedOutcomes(
            [m.KEYED_FAILED], [m.Failure(1, "a value has 1 to 256 parts, this one 0")]
        )

    kind.run(body)


def test_a_long_value_is_committed_from_a_session(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space, session = await space_of(client), await session_of(client)
        parts = [bytes([index]) * CHUNK_BYTES for index in range(5)]
        chunks: list[bytes] = []
        for part in parts:
            chunks += await store_chunks(client, session, [part])
        unknown = data_chunk_id(b"nobody stored this")
        request = m.KeyedCommit(
            session,
            space,
            [b"long", b"lost", b"bad", b"long"],
            [5, 2, 1, 1],
            [*chunks, chunks[0], unknown, b"?", chunks[1]],
        )
        answer = await ask(client, request, m.KeyedOutcomes)
        assert answer.outcomes == [m.KEYED_STORED, m.KEYED_FAILED, m.KEYED_FAILED, m.KEYED_PRESENT]
        assert codes(answer.failures) == [0, CODES[ChunkNotFound], CODES[InvalidArgument], 0]
        again = m.KeyedCommit(session, space, [b"long"], [5], list(chunks), end_session=True)
        assert await ask(client, again, m.KeyedOutcomes) == m.KeyedOutcomes([m.KEYED_PRESENT])
        await refused(client, SessionLost, again)
        assert await value_of(client, space, b"long") == b"".join(parts)

    kind.run(body)


def test_gc_keeps_values_and_frees_removed_ones_unless_they_are_leased(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client)
        await put_keys(client, space, {b"kept": [SMALL, MIDDLE], b"leased": [LARGE], b"gone": [b"gone"]})
        pinned = await ask(client, m.KeyedMatch(space, [b"leased", b"no"], lease=True), m.KeyedMatched)
        assert len(pinned.leases) == 1
        await ask(client, m.KeyedRemove(space, [b"leased", b"gone"]), m.KeyedOutcomes)
        assert await collected(engine) == 1
        assert await read(client, data_chunk_id(LARGE)) == LARGE
        assert await value_of(client, space, b"kept") == SMALL + MIDDLE
        await ask(client, m.CloseLeases(pinned.leases), m.Done)
        assert await collected(engine) == 1
        assert await value_of(client, space, b"kept") == SMALL + MIDDLE
        await check_keepers(engine)

    kind.run(body)


def test_a_space_takes_no_more_than_its_quota(kind: Kind) -> None:
    kind.need_one_home()

    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client, quota_bytes=KEYED_QUOTA_BYTES_MIN)
        session = await session_of(client)
        (chunk,) = await store_chunks(client, session, [b"q" * CHUNK_BYTES])
        full = KEYED_QUOTA_BYTES_MIN // (CHUNK_BYTES + KEYED_PART_CHARGE)
        over = m.KeyedCommit(session, space, [b"over"], [16], [chunk] * 16)
        answer = await ask(client, over, m.KeyedOutcomes)
        assert codes(answer.failures) == [CODES[RequestTooLarge]]
        keys = [bytes([index + 1]) for index in range(full + 1)]
        request = m.KeyedCommit(session, space, keys, [1] * len(keys), [chunk] * len(keys))
        answer = await ask(client, request, m.KeyedOutcomes)
        assert answer.outcomes == [m.KEYED_STORED] * full + [m.KEYED_FAILED]
        assert codes(answer.failures)[-1] == CODES[EngineBusy]
        stat = await stat_of(client)
        assert stat.value_bytes + stat.entries * KEYED_PART_CHARGE <= KEYED_QUOTA_BYTES_MIN

    kind.run(body)


# --- lent memory ---------------------------------------------------------------------------------------


async def slots_of(client: EngineClient, contents: Sequence[bytes], size_bytes: int = 0) -> tuple[int, list[int], int]:
    """Lend memory that holds contents behind each other; returns it, their offsets, and the descriptor."""
    offsets = [sum(map(len, contents[:index])) for index in range(len(contents))]
    size_bytes = size_bytes or sum(map(len, contents))
    with memory_of(size_bytes) as descriptor:
        os.pwrite(descriptor, b"".join(contents), 0)
        memory = await lent(client, descriptor, size_bytes=size_bytes, writable=True)
        return memory, offsets, os.dup(descriptor)


def test_values_are_put_from_slots_and_loaded_into_slots(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            return
        space = await space_of(client)
        contents = [SMALL, MIDDLE, LARGE, b"t" * 100]
        memory, offsets, descriptor = await slots_of(client, contents, 4 * MIB)
        lengths = [len(content) for content in contents]
        put = m.KeyedPut(space, [b"a", b"b", b"out"], [1, 3, 1], [*lengths, 9], [0, 1, 2], memory, [*offsets, 4 * MIB])
        answer = await ask(client, put, m.KeyedOutcomes)
        assert answer.outcomes == [m.KEYED_STORED, m.KEYED_STORED, m.KEYED_FAILED]
        assert await value_of(client, space, b"b") == b"".join(contents[1:])
        load = m.KeyedLoad(memory, space, [b"b", b"no", b"a", b"a"], [2 * MIB, 0, 0, 0], [2 * MIB, 9, 9, 3])
        loaded = await ask(client, load, m.KeyedLoaded)
        assert loaded.counts == [3, 0, 1, 0]
        assert loaded.chunks == [data_chunk_id(content) for content in [*contents[1:], SMALL]]
        assert loaded.lengths == [*lengths[1:], len(SMALL)]
        assert len(loaded.crcs) == 4
        assert codes(loaded.failures) == [0, CODES[KeyNotFound], 0, CODES[InvalidArgument]]
        value = b"".join(contents[1:])
        assert os.pread(descriptor, len(value), 2 * MIB) == value
        assert os.pread(descriptor, len(SMALL), 0) == SMALL
        overlapping = m.KeyedLoad(memory, space, [b"a", b"b"], [10, 12])
        assert (await ask(client, overlapping, m.KeyedLoaded)).counts == [1, 0]
        await ask(client, m.ReturnMemory(memory), m.Done)
        await refused(client, SessionLost, load)
        await refused(client, SessionLost, put)
        os.close(descriptor)

    kind.run(body)


def test_memory_that_shrank_fails_its_keys_and_a_present_key_is_not_copied(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            return
        space = await space_of(client)
        contents = [SMALL, LARGE, MIDDLE]
        memory, offsets, descriptor = await slots_of(client, contents)
        await put_keys(client, space, {b"present": [MIDDLE]})
        os.ftruncate(descriptor, len(SMALL) + 5)
        lengths = [len(content) for content in contents]
        put = m.KeyedPut(space, [b"s", b"l", b"present"], [1, 1, 1], lengths, [], memory, offsets)
        answer = await ask(client, put, m.KeyedOutcomes)
        assert answer.outcomes == [m.KEYED_STORED, m.KEYED_FAILED, m.KEYED_PRESENT]
        assert codes(answer.failures) == [0, CODES[SourceChanged], 0]
        assert await value_of(client, space, b"s") == SMALL
        assert await value_of(client, space, b"l") is None
        assert await value_of(client, space, b"present") == MIDDLE
        os.close(descriptor)

    kind.run(body)


def test_a_put_that_is_too_large_evicts_nothing(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        if not client.carries_descriptors:
            return
        space, session = await space_of(client, quota_bytes=KEYED_QUOTA_BYTES_MIN), await session_of(client)
        (chunk,) = await store_chunks(client, session, [b"q" * CHUNK_BYTES])
        keys = [bytes([index]) for index in range(12)]
        request = m.KeyedCommit(session, space, keys, [1] * len(keys), [chunk] * len(keys))
        assert (await ask(client, request, m.KeyedOutcomes)).outcomes == [m.KEYED_STORED] * len(keys)
        memory, _, descriptor = await slots_of(client, [b"s"], CHUNK_BYTES)
        many = [b"%d" % index for index in range(100, 200)]
        put = m.KeyedPut(space, many, [1] * 100, [CHUNK_BYTES] * 100, [], memory, [0] * 100)
        await refused(client, RequestTooLarge, put)
        assert (await stat_of(client)).entries == len(keys)
        os.close(descriptor)

    kind.run(body)


# --- damage and time -----------------------------------------------------------------------------------


def test_a_value_with_a_damaged_chunk_is_a_miss_and_is_put_again(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client, store = engine.client, engine.store
        if store is None:
            return
        space = await space_of(client)
        await put_keys(client, space, {b"k": [SMALL, LARGE], b"other": [SMALL]})
        chunk = data_chunk_id(LARGE)
        await store.quarantine.note(chunk, records(store)[chunk], ChunkDamaged("planted", subject="x"))
        assert await value_of(client, space, b"k") is None
        assert await value_of(client, space, b"other") == SMALL
        (damaged,) = await store.damaged()
        assert damaged["objects"] == ["space 'space', key 6b"]
        assert await put_keys(client, space, {b"k": [SMALL, LARGE]}) == m.KeyedOutcomes([m.KEYED_STORED])
        assert await value_of(client, space, b"k") == SMALL + LARGE
        stat = await stat_of(client)
        assert (stat.entries, stat.value_bytes) == (2, len(SMALL) * 2 + len(LARGE))

    kind.run(body)


def test_a_value_expires_and_is_put_anew(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        space = await space_of(client, ttl_s=60)
        await put_keys(client, space, {b"k": [SMALL]})
        assert await value_of(client, space, b"k") == SMALL
        if engine.store is None:
            return
        now_ns = engine.store.clock.wall_ns()
        monkeypatch.setattr(
            engine.store.keyed, "values", lambda: Values(engine.store.quarantine.__contains__, now_ns + 61 * 10**9)
        )
        assert await value_of(client, space, b"k") is None
        assert await put_keys(client, space, {b"k": [b"new"]}) == m.KeyedOutcomes([m.KEYED_STORED])
        assert await value_of(client, space, b"k") == b"new"
        stat = await stat_of(client)
        assert (stat.entries, stat.value_bytes) == (1, 3)

    kind.run(body)
