"""Multipart uploads through a lake, on every driver and connection."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import pytest

from lakefs.errors import (
    ChunkNotFound,
    InvalidArgument,
    InvalidPart,
    KeyNotFound,
    PartTooSmall,
    PreconditionFailed,
    SessionLost,
    UploadNotFound,
)
from lakefs.lake.lake_steps import PutData
from lakefs.lake.multipart import UploadName
from lakefs.limits import CHUNK_BYTES, MIB, PART_BYTES_MIN
from lakefs.steps.steps import Send, Start, Steps, send
from lakefs.wire import messages as m
from tests.contract.engines import Kind
from tests.contract.test_lake import Driven, content_of, run

FIRST = content_of(PART_BYTES_MIN + 70_001)
SECOND = content_of(PART_BYTES_MIN)
LAST = content_of(4097)
STORING = (m.StoreChunks, m.StoreFromSource, m.PutObjects)


def md5(content: bytes) -> bytes:
    return hashlib.md5(content).digest()


async def begin(lake: Driven, name: str = "bkt/k", **options: Any) -> UploadName:
    return await lake.run(lake.steps.create_upload(name, **options))


def test_parts_of_every_form_in_any_order_become_one_object(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        upload = await begin(lake, attributes=m.ObjectAttributes(content_type="text/x"))
        path = lake.engine.folder / "part"
        path.write_bytes(FIRST)
        forms: dict[int, PutData] = {7: io.BytesIO(LAST), 1: path, 2: SECOND}
        answers = [await lake.run(lake.steps.put_part(upload, *part)) for part in forms.items()]
        assert [(part.number, part.etag) for part in answers] == [(7, md5(LAST)), (1, md5(FIRST)), (2, md5(SECOND))]
        listed = sorted((part.number, part.etag) for part in answers)
        lake.asked.clear()
        done = await lake.run(lake.steps.complete_upload(upload, listed, checksums={"crc32": b"1234"}))
        moved = [asked for asked in lake.asked if isinstance(asked, STORING)]
        assert all(isinstance(asked, m.StoreChunks) and asked.kinds == [2] for asked in moved)
        assert done.etag == hashlib.md5(b"".join(etag for _, etag in listed)).hexdigest() + "-3"
        assert (done.content_type, done.checksums) == ("text/x", {"crc32": b"1234"})
        assert await lake.run(lake.steps.get("bkt/k")) == FIRST + SECOND + LAST
        lake.asked.clear()
        again = await lake.run(lake.steps.complete_upload(upload, listed))
        assert again == done
        with pytest.raises(UploadNotFound):
            await lake.run(lake.steps.complete_upload(upload, listed[:1]))
        with pytest.raises(UploadNotFound):
            await lake.run(lake.steps.put_part(upload, 1, b"too late"))

    run(kind, body)


def test_what_cannot_be_completed_is_told_apart(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        upload = await begin(lake)
        first = await lake.run(lake.steps.put_part(upload, 1, SECOND[1:]))
        last = await lake.run(lake.steps.put_part(upload, 2, LAST))
        listed = [(1, first.etag), (2, last.etag)]
        with pytest.raises(PartTooSmall):
            await lake.run(lake.steps.complete_upload(upload, listed))
        with pytest.raises(InvalidPart):
            await lake.run(lake.steps.complete_upload(upload, [(1, last.etag)]))
        await lake.run(lake.steps.put_part(upload, 1, SECOND))
        with pytest.raises(InvalidPart):
            await lake.run(lake.steps.complete_upload(upload, listed))
        listed[0] = (1, md5(SECOND))
        await lake.run(lake.steps.put("bkt/k", b"there"))
        with pytest.raises(PreconditionFailed):
            await lake.run(lake.steps.complete_upload(upload, listed, condition=m.Condition(absent=True)))
        with pytest.raises(InvalidArgument):
            await lake.run(lake.steps.put_part(upload, 3, 17))  # type: ignore[arg-type]
        await lake.run(lake.steps.complete_upload(upload, listed))
        assert await lake.run(lake.steps.get("bkt/k")) == SECOND + LAST

    run(kind, body)


def test_a_given_md5_is_the_part_s_etag_and_checksums_come_back(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        upload = await begin(lake, details={"x": "y"})
        put = lake.steps.put_part(upload, 1, LAST, md5=b"0123456789abcdef", checksums={"crc32": b"1234"})
        part = await lake.run(put)
        page = await lake.run(lake.steps.parts_page(upload))
        assert page.parts == [part]
        assert (part.etag, part.checksums) == (b"0123456789abcdef", {"crc32": b"1234"})
        assert page.upload.details == {"x": "y"}
        uploads = await lake.run(lake.steps.uploads_page("bkt/k"))
        assert [(entry.key, entry.upload) for entry in uploads.entries] == [("k", upload.upload)]
        await lake.run(lake.steps.abort_upload(upload))
        with pytest.raises(UploadNotFound):
            await lake.run(lake.steps.parts_page(upload))

    run(kind, body)


# --- parts that are copied -----------------------------------------------------------------------------


def test_a_copied_part_takes_over_chunks_and_moves_only_its_ends(kind: Kind) -> None:
    source = content_of(3 * CHUNK_BYTES + 1000)

    async def body(lake: Driven) -> None:
        stat = (await lake.run(lake.steps.put("bkt/source", source))).stat
        upload = await begin(lake)
        lake.asked.clear()
        whole = await lake.run(lake.steps.copy_part(upload, 1, "bkt/source", if_match=stat.etag))
        assert not any(isinstance(asked, STORING) and 1 in getattr(asked, "kinds", [1]) for asked in lake.asked)
        begin_at, length = CHUNK_BYTES - 10, CHUNK_BYTES + MIB
        lake.asked.clear()
        ranged = await lake.run(lake.steps.copy_part(upload, 2, "bkt/source", offset=begin_at, length=length))
        stored = [asked for asked in lake.asked if isinstance(asked, m.StoreChunks) and asked.kinds == [1]]
        moved = sum(sum(asked.lengths) for asked in stored)
        assert moved == 10 + MIB - 10
        tail = await lake.run(lake.steps.copy_part(upload, 3, "bkt/source", offset=len(source) - 5))
        listed = [(part.number, part.etag) for part in (whole, ranged, tail)]
        await lake.run(lake.steps.remove("bkt/source"))
        await lake.run(lake.steps.gc())
        await lake.run(lake.steps.complete_upload(upload, listed))
        expected = source + source[begin_at : begin_at + length] + source[-5:]
        assert await lake.run(lake.steps.get("bkt/k")) == expected

    run(kind, body)


def test_a_part_is_not_copied_from_what_is_not_there_or_was_replaced(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        upload = await begin(lake)
        await lake.run(lake.steps.put("bkt/source", LAST))
        with pytest.raises(KeyNotFound):
            await lake.run(lake.steps.copy_part(upload, 1, "bkt/missing"))
        with pytest.raises(PreconditionFailed):
            await lake.run(lake.steps.copy_part(upload, 1, "bkt/source", if_match="another"))
        for offset, length in ((-1, 1), (0, len(LAST) + 1), (len(LAST) + 1, None), (5, -1)):
            with pytest.raises(InvalidArgument):
                await lake.run(lake.steps.copy_part(upload, 1, "bkt/source", offset=offset, length=length))
        assert (await lake.run(lake.steps.parts_page(upload))).parts == []

    run(kind, body)


def test_a_copied_part_has_the_md5_of_its_source_where_that_is_known(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        attributes = m.ObjectAttributes(etag_kind=1, etag=md5(LAST))
        change = m.NameChange("bkt", "source", b"", attributes)
        await lake.engine.client.call(m.PutObjects([len(LAST)], [change]), [LAST])
        upload = await begin(lake)
        assert (await lake.run(lake.steps.copy_part(upload, 1, "bkt/source"))).etag == md5(LAST)
        part = await lake.run(lake.steps.copy_part(upload, 1, "bkt/source", offset=1))
        assert part.etag not in (md5(LAST), md5(LAST[1:]))

    run(kind, body)


# --- when things go wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [SessionLost, ChunkNotFound])
def test_a_part_or_completion_whose_session_is_lost_begins_again(kind: Kind, lost: type[Exception]) -> None:
    async def body(lake: Driven) -> None:
        upload = await begin(lake)
        part = await lake.run(_failing_once(lake.steps.put_part(upload, 1, FIRST), m.UploadPut, lost))
        listed = [(1, part.etag)]
        done = await lake.run(_failing_once(lake.steps.complete_upload(upload, listed), m.UploadComplete, lost))
        assert done.size_bytes == len(FIRST)
        assert await lake.run(lake.steps.get("bkt/k")) == FIRST

    run(kind, body)


def _failing_once(
    steps: Any, request: type[m.UploadPut] | type[m.UploadComplete], error: type[Exception]
) -> Steps[Any]:
    """Take the same steps, but fail the first request of that type instead of sending it."""
    answer: Any = None
    failure: BaseException | None = None
    failed = False
    while True:
        try:
            step = steps.throw(failure) if failure is not None else steps.send(answer)
        except StopIteration as end:
            assert failed, "the request was never made"
            return end.value
        answer, failure = None, None
        asked = step.effect.request if isinstance(step, Start) and isinstance(step.effect, Send) else None
        if not failed and isinstance(asked, request):
            failed = True
            if error is SessionLost:
                yield from send(m.SessionEnd(asked.session))
            failure = error("lost on the way")
            continue
        try:
            answer = yield step
        except Exception as raised:  # noqa: BLE001 - thrown into the operation, which raises it
            failure = raised
