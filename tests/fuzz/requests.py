"""Requests with odd values in every field, against a real engine on a simulated disk: well-formed, and senseless.

The wire's readers accept any value that a field's type can have.  Values from answers (ids, names, versions) are used
again, so that many requests are about something that exists.  Each request is done, or refused with an error of the
tree that does not mean a bug; afterwards the store is whole.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final, cast, get_args, get_origin

import msgspec

from engine.coordinator.coordinator_requests import coordinator_group
from engine.coordinator.names_coordinator import open_names_coordinator
from engine.process.embedded import EmbeddedEngine
from engine.requests.table import NamesService
from engine.superblock.superblock import NO_CLUSTER
from lakefs.content.verify import granule_crcs
from lakefs.errors import InternalError, LakeError
from lakefs.limits import CHUNK_BYTES
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.names_rig import names_store
from tests.store_rig import ask, client_of, simulated_store

BUCKET: Final = "bucket"
_LEARNT_MAX: Final = 40
_NUMBERS: Final = tuple(
    sign * (1 << bits) + more for bits in (0, 8, 16, 31, 32, 53, 63) for sign in (1, -1) for more in (-1, 0, 1)
)
_TEXTS: Final = (
    *("", "a", BUCKET, "a/b", "a/", "..", "\0", "é", "x" * 2000, "x" * 5000, "null", "enabled", "f" * 16, "//"),
    *("a/../b", "\u2028", "-1", "*", '"'),
)
_BYTES: Final = (b"", b"\0", *(bytes([kind]) * size for kind in (0, 1, 2, 3) for size in (16, 32, 33)), b"x" * 1000)
_WHOLE_STORE: Final = (m.RunGc, m.RunFsck, m.RunScrub)
_SENT: Final = [shape for shape in m.REQUESTS.values() if shape is not m.Hello]


class OddRequests:
    """Makes requests of these shapes; the same for the same seed and the same answers."""

    def __init__(self, seed: int, shapes: Sequence[type[m.Request]] = _SENT) -> None:
        self._shapes = shapes
        self._random = random.Random(seed)
        self._values: dict[type, list[Any]] = {int: list(_NUMBERS), str: list(_TEXTS), bytes: list(_BYTES)}
        self._learnt: dict[type, list[Any]] = {int: [], str: [], bytes: []}

    def next(self) -> tuple[m.Request, list[bytes]]:
        """Make one more request, and the body that is sent with it."""
        shape = self._random.choice(self._shapes)
        if shape in _WHOLE_STORE and self._random.random() < 0.9:
            shape = m.StatNames
        request = cast(m.Request, self._message(shape))
        if not isinstance(request, m.StoreChunks | m.PutObjects | m.StoreShards):
            return request, []
        body = self._random.randbytes(self._random.choice((0, 1, 100, 4096, 70_000)))
        if self._random.random() < 0.7:
            request = msgspec.structs.replace(request, lengths=[len(body)])
            if isinstance(request, m.StoreShards):
                name = [bytes((1, *self._random.randbytes(1))) * 16 + b"x"], [self._random.choice((0, 1, 254, 255))]
                crcs, chunk_bytes = [granule_crcs(body)], self._random.choice((len(body), len(body), 70_001))
                request = m.StoreShards(0, 1, *name, [len(body)], crcs, chunk_lengths=[chunk_bytes])
        return request, [body]

    def learn(self, value: object) -> None:
        """Use the values of an answer from now on."""
        if isinstance(value, msgspec.Struct):
            value = list(msgspec.structs.astuple(value))
        if isinstance(value, list | tuple):
            for entry in value[:50]:
                self.learn(entry)
        elif type(value) in self._learnt and value not in self._learnt[type(value)]:
            known = self._learnt[type(value)]
            known.append(value)
            del known[:-_LEARNT_MAX]

    def _message(self, shape: type[msgspec.Struct]) -> msgspec.Struct:
        fields = msgspec.structs.fields(shape)
        return shape(
            **{field.name: self._value(field.type) for field in fields if field.required or self._random.random() < 0.4}
        )

    def _value(self, kind: Any) -> object:
        choice = self._random.choice
        if kind in self._values:
            return choice(self._learnt[kind] or self._values[kind]) if choice((0, 1)) else choice(self._values[kind])
        if kind is bool or kind is type(None):
            return choice((True, False)) if kind is bool else None
        if kind is float:
            return choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._message(kind)
        return self._compound(get_origin(kind), get_args(kind))

    def _compound(self, origin: object, kinds: Sequence[Any]) -> object:
        count = self._random.choice((0, 1, 1, 2, 3, 8))
        if origin is list:
            return [self._value(kinds[0]) for _ in range(count)]
        if origin is dict:
            return {self._value(kinds[0]): self._value(kinds[1]) for _ in range(count)}
        if origin is tuple:
            return tuple(self._value(kind) for kind in kinds)
        return self._value(self._random.choice(kinds))  # a union


def as_sent(request: m.Request) -> m.Request | None:
    """Return the request as it is after the wire; None when it cannot be sent."""
    try:
        sent: m.Request = msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request))
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError):
        return None
    return sent


async def survive_at_names(seed: int, count: int, shapes: Sequence[type[m.Request]]) -> tuple[int, int]:
    """Send so many requests to names with a coordinator; return how many were done, and how many refused."""
    async with (
        names_store() as store,
        open_names_coordinator(store.metadata, store.clock, store.superblock.incompat_features) as coordinator,
    ):
        service = NamesService(store, coordinator=coordinator_group(coordinator))
        return await _send(OddRequests(seed, shapes), EmbeddedEngine(service, descriptors=False), count)


async def survive(
    seed: int, count: int, shapes: Sequence[type[m.Request]] = _SENT, cluster_id: bytes = NO_CLUSTER
) -> tuple[int, int]:
    """Send so many requests; return how many were done, and how many refused.  Any other error is a bug.

    `cluster_id`: of the lake that the engine is a member of.
    """
    async with simulated_store(cluster_id=cluster_id) as store:
        client = client_of(store)
        await ask(client, m.BucketCreate(BUCKET), m.Buckets)
        done, refused = await _send(OddRequests(seed, shapes), client, count)
        report = msgspec.json.decode((await ask(client, m.RunFsck(), m.ReportReply)).report_json)
        assert report["damage"] == 0, report["findings"]
    return done, refused


async def _send(odd: OddRequests, client: EngineClient, count: int) -> tuple[int, int]:
    """Send so many requests; return how many were done, and how many refused."""
    done = refused = 0
    for _ in range(count):
        request, body = odd.next()
        sent = as_sent(request)
        if sent is None or sum(map(len, body)) > CHUNK_BYTES:
            continue
        try:
            reply = await client.call(sent, body)
        except InternalError:
            raise
        except LakeError:
            refused += 1
            continue
        reply.body.release()
        odd.learn(reply.message)
        done += 1
    return done, refused
