"""One S3 request on its way: what it asks for, who asks, and what the operations work with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from gateway.http.messages import Request, Response
from gateway.s3.protocol.errors import S3Error, from_lake, no_such_key
from gateway.s3.protocol.signing import Signature
from gateway.s3.protocol.targets import Target
from gateway.s3.request.content import Contents
from gateway.s3.request.receiving import ReceiveMemory
from lakefs.client.trio.driver import TrioDriver
from lakefs.errors import LakeError
from lakefs.limits import S3_RECEIVE_BYTES
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient

M = TypeVar("M", bound=m.Message)
XML: Final = (b"Content-Type", b"application/xml")


class Lakes:
    """The store, as the operations use it: requests, whole operations, content, and threads for long computations."""

    __slots__ = ("contents", "driver", "engine", "memory", "offload")

    def __init__(self, engine: EngineClient, driver: TrioDriver, offload: Offload) -> None:
        self.engine = engine
        self.driver = driver
        self.offload = offload
        self.contents = Contents(engine, driver)
        self.memory = ReceiveMemory(S3_RECEIVE_BYTES)


@dataclass(slots=True)
class Call:
    """One request that was let in.  `signature` is None for a stranger.

    `headers`: names in lower case; those that came in the query are among them.
    """

    request: Request
    target: Target
    headers: Mapping[bytes, bytes]
    signature: Signature | None
    lakes: Lakes
    region: str

    @property
    def bucket(self) -> str:
        """The bucket that it is about."""
        return self.target.bucket

    @property
    def key(self) -> str:
        """The key in it."""
        return self.target.key

    def header(self, name: bytes) -> str:
        """A header as text, "" without one; bytes beyond ASCII as Latin-1, as HTTP has them."""
        return self.headers.get(name, b"").decode("latin-1")

    def parameter(self, name: str) -> str:
        """A parameter of the query, "" without one."""
        return self.target.parameters.get(name, "")

    async def ask(self, request: m.Request, reply: type[M]) -> M:
        """The store's answer to one request."""
        message = (await self.lakes.engine.call(request)).message
        assert isinstance(message, reply)
        return message

    async def ask_one(self, request: m.Request) -> m.ObjectStat:
        """The stat that a request about one name is answered with; its failure is raised.  KeyNotFound for nothing."""
        return stat_of((await self.ask(request, m.NameResults)).results[0], self.key)


def stat_of(result: m.NameResult, key: str) -> m.ObjectStat:
    """An item of a batch, or its error raised."""
    if result.failure is not None:
        failure = result.failure
        raise failure.as_error()
    if result.stat is None:
        raise no_such_key(key)
    return result.stat


def xml_response(document: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> Response:
    """200 with an XML body."""
    return Response(200, [XML, *headers], [document])


def lake_error(error: LakeError, call: Call) -> S3Error:
    """The store's error in S3's words, about this request's resource."""
    return from_lake(error, f"/{call.bucket}/{call.key}" if call.key else f"/{call.bucket}")
