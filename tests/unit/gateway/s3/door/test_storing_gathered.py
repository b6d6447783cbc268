"""Gathered PUTs are answered when the store has taken them, else given back; tried again only if nothing was done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast
from urllib.parse import unquote_to_bytes

import pytest
import trio

from gateway.s3.door._repeater import Put
from gateway.s3.operations.gathered import GatheredPuts
from gateway.s3.protocol.signing import AccessKey
from lakefs.errors import EngineUnreachable, InternalError, LakeError, RequestTooLarge, StoreFull
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Failure, NameResult, NameResults, ObjectStat, PutObjects
from tests.unit.gateway.s3.door.taught import KEY_ID, Taught

EPOCH = 7
KEY = AccessKey(KEY_ID, "secret")


def _stat(bucket: str, key: str) -> ObjectStat:
    return ObjectStat(bucket, key, 1 if key.endswith("/") else 2, 1, 5, f"tag-of-{key}", 0, version="v1")


class Engine:
    """An engine that gives one answer, and notes its requests."""

    def __init__(self, answer: LakeError | Exception | None = None, failing: Sequence[str] = ()) -> None:
        self.requests: list[PutObjects] = []
        self.payloads: list[list[bytes]] = []
        self._answer = answer
        self._failing = failing

    async def call(self, request: PutObjects, payloads: Sequence[memoryview]) -> Reply:
        self.requests.append(request)
        self.payloads.append([bytes(payload) for payload in payloads])
        await trio.lowlevel.checkpoint()
        if self._answer is not None:
            raise self._answer
        results = [
            NameResult(failure=Failure(1, "no"))
            if change.key in self._failing
            else NameResult(
                ObjectStat(
                    change.bucket,
                    change.key,
                    1 + (change.key[-1] != "/"),
                    1,
                    5,
                    f"tag-of-{change.key}",
                    0,
                    version="v1",
                ),
                stamps=b"" if change.key == "unstamped" else b"stamps",
            )
            for change in request.changes
        ]
        return Reply(NameResults(results), epoch=EPOCH)


class Door:
    """Notes what is answered, and given back."""

    is_logging = False
    is_open = True

    def __init__(self) -> None:
        self.answered: dict[bytes, bytes] = {}
        self.given_back: dict[bytes, LakeError | None] = {}
        self.learned: dict[bytes, bytes] = {}

    def answer(self, put: Put, lines: bytes, name: bytes) -> None:
        assert put.target not in self.given_back
        self.answered[put.target] = lines

    def learn_puts(self, written: Sequence[tuple[Put, ObjectStat, bytes]], epoch: int) -> None:
        assert epoch == EPOCH
        for put, stat, stamps in written:
            assert stat.key.encode() == unquote_to_bytes(put.target)[len(b"/bucket/") :]
            self.learned[put.target] = stamps

    def give_back(self, put: Put, failure: LakeError | None = None) -> None:
        if put.target not in self.answered:
            self.given_back[put.target] = failure


@pytest.fixture
def taught() -> Iterator[Taught]:
    made = Taught()
    yield made
    made.close()


def stored(taught: Taught, targets: Sequence[bytes], engine: Engine, key: AccessKey | None = KEY) -> Door:
    """Store PUTs of these targets, and return the door, which has noted them."""
    puts = []
    for target in targets:
        put = taught.held(taught.put(target * 3, target=target, more={"Content-Type": "text/x"}))
        assert put is not None
        puts.append(put)
        taught.door.leave(put.descriptor)
    door = Door()
    gathered = GatheredPuts(cast(Any, engine), cast(Any, door), ("s3.test",), lambda name: key)
    trio.run(gathered.store, puts)
    assert {*door.answered, *door.given_back} == set(targets), "each was answered or given back"
    return door


def test_all_are_stored_with_one_request_and_answered(taught: Taught) -> None:
    engine = Engine()
    door = stored(taught, [b"/bucket/a", b"/bucket/b%20c"], engine)
    (request,) = engine.requests
    assert [(change.bucket, change.key) for change in request.changes] == [("bucket", "a"), ("bucket", "b c")]
    assert engine.payloads == [[b"/bucket/a" * 3, b"/bucket/b%20c" * 3]]
    assert request.lengths == [27, 39]
    assert request.durable
    assert all(change.attributes.content_type == "text/x" for change in request.changes)
    assert door.given_back == {}
    assert door.answered[b"/bucket/b%20c"] == b'ETag: "tag-of-b c"\r\nx-amz-version-id: v1\r\n'


@pytest.mark.parametrize(
    "target", [b"/bucket", b"/bucket/", b"/", b"/.hidden/a", b"/bucket/%zz", b"/bucket/%00", b"/bucket/" + b"k" * 1025]
)
def test_what_is_no_object_of_a_bucket_is_not_tried_here(taught: Taught, target: bytes) -> None:
    engine = Engine()
    door = stored(taught, [target, b"/bucket/good"], engine)
    assert door.given_back == {target: None}
    assert [change.key for change in engine.requests[0].changes] == ["good"]


@pytest.mark.parametrize(
    "key", [None, AccessKey(KEY_ID, "s", read_only=True), AccessKey(KEY_ID, "s", buckets=("another",))]
)
def test_a_key_without_the_right_or_that_is_gone_stores_nothing(taught: Taught, key: AccessKey | None) -> None:
    engine = Engine()
    door = stored(taught, [b"/bucket/a"], engine, key)
    assert door.given_back == {b"/bucket/a": None}
    assert engine.requests == []


def test_objects_are_taught_with_their_stamps_and_folders_are_not(taught: Taught) -> None:
    engine = Engine()
    door = stored(taught, [b"/bucket/a", b"/bucket/folder/", b"/bucket/unstamped"], engine)
    assert engine.requests[0].stamps
    assert door.learned == {b"/bucket/a": b"stamps"}


def test_a_name_that_the_store_refuses_is_given_back_alone(taught: Taught) -> None:
    door = stored(taught, [b"/bucket/a", b"/bucket/b", b"/bucket/c"], Engine(failing=["b"]))
    assert door.given_back == {b"/bucket/b": None}
    assert set(door.answered) == {b"/bucket/a", b"/bucket/c"}


def test_a_request_that_was_refused_as_a_whole_is_tried_again_one_by_one(taught: Taught) -> None:
    door = stored(taught, [b"/bucket/a", b"/bucket/b"], Engine(RequestTooLarge("too large")))
    assert door.given_back == {b"/bucket/a": None, b"/bucket/b": None}


@pytest.mark.parametrize("error", [EngineUnreachable("gone"), StoreFull("full")])
def test_a_request_that_may_have_been_carried_out_is_not_tried_again(taught: Taught, error: LakeError) -> None:
    door = stored(taught, [b"/bucket/a", b"/bucket/b"], Engine(error))
    assert door.given_back == {b"/bucket/a": error, b"/bucket/b": error}


def test_a_bug_is_an_error_of_each_request(taught: Taught) -> None:
    door = stored(taught, [b"/bucket/a", b"/bucket/b"], Engine(KeyError("a bug")))
    assert all(isinstance(failure, InternalError) for failure in door.given_back.values())
