"""Names bound to what a head has stored: on answers that the names accept, and on no others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from lakefs.errors import InvalidArgument, KeyNotFound, LakeError, RequestTooLarge, SessionLost, UnsupportedVersion
from lakefs.ids import EMPTY_BLOB, GcGeneration, RingEpoch
from lakefs.limits import BATCH_MAX, BLOB_BYTES_MAX
from lakefs.wire import messages as m
from tests.names_rig import names_store
from tests.store_rig import PLAIN, ask, change, client_of, good, run, session_of, simulated_store

ONE, TWO = b"\2" + b"1" * 32, b"\2" + b"2" * 32
"""Manifests of blobs."""
JOINED, OLDEST = 7, 3
NOW = m.Answered(JOINED, OLDEST)
Body = Callable[[EmbeddedEngine, BindGate], Awaitable[None]]


def with_names(body: Body) -> None:
    """Run with a client of names that have joined generation JOINED."""

    async def main() -> None:
        async with names_store() as store:
            gate = BindGate(GcGeneration(JOINED), RingEpoch(OLDEST))
            client = EmbeddedEngine(NamesService(store, gate=gate), descriptors=False)
            await body(client, gate)
            await client.aclose()

    run(main)


def bind(*changes: m.NameChange, answered: m.Answered = NOW, folders: bool = False) -> m.BindBlobs:
    return m.BindBlobs(answered, list(changes), [70_000] * len(changes), [3] * len(changes), folders=folders)


async def begin_upload(client: EmbeddedEngine) -> m.UploadStat:
    await ask(client, m.BucketCreate("bkt"), m.Buckets)
    return await ask(client, m.UploadCreate("bkt", "big", PLAIN), m.UploadStat)


def part_of(upload: m.UploadStat, answered: m.Answered = NOW) -> m.BindPart:
    return m.BindPart(answered, m.UploadPut(b"", "bkt", "big", upload.upload, 1, ONE, b"\5" * 16), 6_000_000, 2)


def completed(upload: m.UploadStat, answered: m.Answered = NOW, *, count: int = 2) -> m.BindUpload:
    complete = m.UploadComplete(b"", "bkt", "big", upload.upload, ONE, [1], [b"\5" * 16])
    return m.BindUpload(answered, complete, 6_000_000, count)


def test_names_are_bound_as_by_a_commit_with_the_heads_figures() -> None:
    async def body(client: EmbeddedEngine, gate: BindGate) -> None:
        request = bind(change("a", TWO), change("b/c", ONE), change("no", ONE, condition=m.Condition(etags=["*"])))
        results = (await ask(client, request, m.NameResults)).results
        assert [result.failure and type(result.failure.as_error()) for result in results] == [None, None, KeyNotFound]
        (found,) = good(await ask(client, m.StatNames([("bkt", "a")]), m.NameResults))
        assert (found.blob, found.size_bytes, found.chunk_count) == (TWO, 70_000, 3)
        told = (await ask(client, bind(change("b/d", ONE), folders=True), m.NameResults)).results
        assert told[0].folder is not None

    with_names(body)


@pytest.mark.parametrize(
    ("generation", "epoch", "is_accepted"),
    [(7, 3, True), (6, 3, True), (9, 4, True), (5, 3, False), (0, 3, False), (7, 2, False), (-1, -1, False)],
)
def test_answers_too_old_bind_nothing(generation: int, epoch: int, is_accepted: bool) -> None:
    async def body(client: EmbeddedEngine, gate: BindGate) -> None:
        upload = await begin_upload(client)
        answered = m.Answered(generation, epoch)
        for request in (bind(change("k", ONE), answered=answered), part_of(upload, answered)):
            if is_accepted:
                await client.call(request)
            else:
                with pytest.raises(SessionLost, match="offer the chunks again"):
                    await client.call(request)
        await ask(client, part_of(upload), m.PartStat)
        if not is_accepted:
            with pytest.raises(SessionLost):
                await client.call(completed(upload, answered))
        bound = [entry.key for entry in (await ask(client, m.ListNames("bkt"), m.Listed)).entries]
        assert bound == (["k"] if is_accepted else [])

    with_names(body)


def test_the_gate_goes_up_and_never_down_and_says_where_it_is() -> None:
    async def body(client: EmbeddedEngine, gate: BindGate) -> None:
        assert await ask(client, m.AcceptedAnswers(), m.AnswersAccepted) == m.AnswersAccepted(JOINED, OLDEST)
        gate.join(GcGeneration(9))
        gate.join(GcGeneration(8))
        gate.retire_below(RingEpoch(4))
        gate.retire_below(RingEpoch(1))
        assert await ask(client, m.AcceptedAnswers(), m.AnswersAccepted) == m.AnswersAccepted(9, 4)
        with pytest.raises(SessionLost):
            await client.call(bind(change("k", ONE)))

    with_names(body)


def test_a_generation_that_is_joined_while_a_bind_waits_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate counts in the step of the decision, not when the request arrives."""

    async def body(client: EmbeddedEngine, gate: BindGate) -> None:
        metadata = client._service._names.metadata  # type: ignore[attr-defined]
        commit = metadata.commit

        async def later(*args: object, **options: object) -> object:
            gate.join(GcGeneration(JOINED + 2))
            return await commit(*args, **options)

        monkeypatch.setattr(metadata, "commit", later)
        with pytest.raises(SessionLost):
            await client.call(bind(change("k", ONE)))

    with_names(body)


def test_an_upload_is_completed_once_and_answered_alike_again() -> None:
    async def body(client: EmbeddedEngine, gate: BindGate) -> None:
        upload = await begin_upload(client)
        with pytest.raises(SessionLost, match="not held"):
            await client.call(completed(upload, count=0))
        assert (await ask(client, part_of(upload), m.PartStat)).size_bytes == 6_000_000
        first = await ask(client, completed(upload), m.NameResults)
        assert (good(first)[0].blob, good(first)[0].chunk_count) == (ONE, 2)
        assert await ask(client, completed(upload, m.Answered(0, 0), count=0), m.NameResults) == first

    with_names(body)


def test_odd_requests_are_refused_and_bind_nothing() -> None:
    async def body(client: EmbeddedEngine, gate: BindGate) -> None:
        changes, data = [change("k", ONE)], [change("k", b"\1" * 33)]
        for request, error in (
            (m.BindBlobs(NOW, changes, [], [2]), InvalidArgument),
            (m.BindBlobs(NOW, changes, [1], []), InvalidArgument),
            (m.BindBlobs(NOW, changes, [-1], [2]), InvalidArgument),
            (m.BindBlobs(NOW, changes, [BLOB_BYTES_MAX + 1], [2]), InvalidArgument),
            (m.BindBlobs(NOW, changes, [1], [0]), InvalidArgument),
            (m.BindBlobs(NOW, changes, [1], [1]), InvalidArgument),
            (m.BindBlobs(NOW, data, [1], [2]), InvalidArgument),
            (m.BindBlobs(NOW, data, [0], [1]), InvalidArgument),
            (m.BindBlobs(NOW, [change("k", EMPTY_BLOB)], [1], [1]), InvalidArgument),
            (m.BindBlobs(NOW, [change("k", b"no id")], [1], [1]), InvalidArgument),
            (m.BindBlobs(NOW, changes * (BATCH_MAX + 1), [1], [1]), RequestTooLarge),
        ):
            with pytest.raises(error):
                await client.call(request)
        assert good(await ask(client, bind(), m.NameResults)) == []
        with suppress(LakeError):
            found = (await ask(client, m.ListNames("bkt"), m.Listed)).entries
            assert found == []

    with_names(body)


def test_a_blob_without_content_is_bound_by_a_head_as_by_anybody() -> None:
    async def body(client: EmbeddedEngine, gate: BindGate) -> None:
        request = m.BindBlobs(NOW, [change("k", EMPTY_BLOB)], [0], [1])
        assert good(await ask(client, request, m.NameResults))[0].size_bytes == 0

    with_names(body)


@pytest.mark.parametrize("request_", [bind(change("k", ONE)), m.AcceptedAnswers()], ids=lambda one: type(one).__name__)
def test_only_names_of_a_lake_believe_heads(request_: m.Request) -> None:
    async def main() -> None:
        async with simulated_store() as store, names_store() as names:
            for client in (client_of(store), EmbeddedEngine(NamesService(names), descriptors=False)):
                assert await session_of(client)
                with pytest.raises(UnsupportedVersion, match=type(request_).__name__):
                    await client.call(request_)
                await client.aclose()

    run(main)
