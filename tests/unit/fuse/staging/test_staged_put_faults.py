"""An edited file is stored whole or not at all: lost sessions, concurrent changes, folders that cannot be read."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import pytest

from lakefs import errors
from lakefs.limits import CHUNK_BYTES
from lakefs.steps.steps import Send, Start, Steps, Wait, send
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from tests.contract.engines import KINDS, Kind
from tests.edited_file import NAME, Edited, edit

T = TypeVar("T")


ASKED = ["embedded", "unix", "tcp"]


@pytest.fixture(params=ASKED)
def kind(request: pytest.FixtureRequest) -> Kind:
    """The engine in the same process, on its socket, and over a network."""
    return KINDS[request.param]


def before_each(
    request_type: type[m.Request], times: int, steps: Steps[T], act: Callable[[Any], Steps[Any] | None]
) -> Steps[T]:
    """Take the same steps, but before each of the first requests of a type call `act(request)` and take its steps."""
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            step = steps.throw(error) if error is not None else steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer, error = None, None
        request = step.effect.request if isinstance(step, Start) and isinstance(step.effect, Send) else None
        if isinstance(request, request_type) and times:
            times -= 1
            further = act(request)
            if further is not None:
                yield from further
        try:
            answer = yield step
        except errors.LakeError as raised:
            error = raised


def ending_session(request: Any) -> Steps[Any]:
    return send(m.SessionEnd(request.session))


def test_a_store_that_lost_its_session_begins_again(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        await edited.base_on(random.Random(7).randbytes(3 * CHUNK_BYTES))
        edited.write(5, b"edited")
        edited.write(2 * CHUNK_BYTES, bytes(CHUNK_BYTES))
        with pytest.raises(errors.SessionLost):
            await edited.lake.run(before_each(m.Commit, 3, edited.storing(), ending_session))
        await edited.lake.run(before_each(m.Commit, 2, edited.storing(), ending_session))
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content
        await edited.store()

    edit(kind, body)


def test_a_source_of_a_lost_connection_is_opened_again(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.write(0, random.Random(8).randbytes(3 * CHUNK_BYTES))

        def forgetting(request: m.StoreFromSource) -> Steps[Any]:
            return send(m.SourceClose(request.source))

        await edited.lake.run(before_each(m.StoreFromSource, 2, edited.storing(), forgetting))
        await edited.store()

    edit(kind, body)


def denying(steps: Steps[T]) -> Steps[T]:
    """Take the same steps, but answer every offer as if the engine had none of it."""
    answer: Any = None
    offers: list[object] = []
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result
        answer = yield step
        if isinstance(step, Start) and isinstance(step.effect, Send) and isinstance(step.effect.request, m.Offer):
            offers.append(answer)
        elif isinstance(step, Wait) and any(step.ticket is ticket for ticket in offers):
            answer = Reply(m.Offered([False] * len(answer.message.present)))


def test_what_the_store_does_not_have_any_more_is_stored_again(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        await edited.base_on(random.Random(10).randbytes(3 * CHUNK_BYTES))
        edited.write(0, b"edited")
        edited.truncate(6 * CHUNK_BYTES)
        edited.lake.asked.clear()
        await edited.lake.run(denying(edited.storing()))
        assert edited.sent_bytes == 4 * CHUNK_BYTES, "three chunks, and one of zeros for all three of the hole"
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content

    edit(kind, body)


def test_content_that_changes_while_it_is_stored_is_not_torn(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        await edited.base_on(bytes(2 * CHUNK_BYTES))
        edited.write(0, b"1")
        numbers = iter(range(2, 10))

        def meddling(request: m.Request) -> None:
            edited.write(0, b"%d" % next(numbers))

        with pytest.raises(errors.SourceChanged):
            await edited.lake.run(before_each(m.StoreChunks, 100, edited.storing(), meddling))
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == bytes(2 * CHUNK_BYTES)
        await edited.lake.run(before_each(m.StoreChunks, 1, edited.storing(), meddling))
        assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == edited.content

    edit(kind, body)


def test_a_staging_folder_that_the_engine_does_not_read_from_is_sent(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        edited.write(0, random.Random(9).randbytes(2 * CHUNK_BYTES + 5))
        with mock.patch("engine.host.client_files.file_system", return_value=0):
            await edited.store()
        assert edited.lake.count(m.StoreFromSource) == 0
        assert edited.sent_bytes == 2 * CHUNK_BYTES + 5

    edit(kind, body)


def test_a_staging_file_that_somebody_shortened_is_not_stored(kind: Kind) -> None:
    async def body(edited: Edited) -> None:
        await edited.base_on(b"before")
        for size in (1000, 2 * CHUNK_BYTES):
            edited.write(0, random.Random(size).randbytes(size))
            os.ftruncate(edited.file.descriptor, size // 3)
            with pytest.raises((errors.LocalFileError, errors.SourceChanged)):
                await edited.lake.run(edited.storing())
            assert await edited.lake.run(edited.lake.steps.get(str(NAME))) == b"before"

    edit(kind, body)
