"""One S3 request in progress: its target, its caller, and the store that the operations use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from gateway.http.messages import Request, Response
from gateway.s3.door.teaching import S3Door
from gateway.s3.protocol.errors import S3Error, from_lake, invalid_argument, no_such_key
from gateway.s3.protocol.signing import Signature
from gateway.s3.protocol.targets import Target
from gateway.s3.request.content import Contents
from gateway.s3.request.receiving import ReceiveMemory
from lakefs.client.trio.driver import TrioDriver
from lakefs.errors import LakeError
from lakefs.limits import S3_PARTS_MAX, S3_RECEIVE_BYTES
from lakefs.ports import Offload
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient

M = TypeVar("M", bound=m.Message)
XML: Final = (b"Content-Type", b"application/xml")


class Lakes:
    """The store, as the operations use it: requests, whole operations, content, and threads for long computations."""

    __slots__ = ("contents", "door", "driver", "engine", "memory", "offload")

    def __init__(self, engine: EngineClient, driver: TrioDriver, offload: Offload, door: S3Door | None = None) -> None:
        """`door`: what learns the answers to GET and HEAD; None: they are not repeated."""
        self.engine = engine
        self.driver = driver
        self.offload = offload
        self.door = door
        self.contents = Contents(engine, driver, self.wants_stamps)
        self.memory = ReceiveMemory(S3_RECEIVE_BYTES)

    def wants_stamps(self) -> bool:
        """Return True if answers about names are to be asked for with their stamps, to be learned."""
        return self.door is not None and self.door.is_open


@dataclass(slots=True)
class Call:
    """One authorized request.  `signature` is None for a caller without a key.

    `headers`: names in lower case; headers sent in the query are included.
    """

    request: Request
    target: Target
    headers: Mapping[bytes, bytes]
    signature: Signature | None
    lakes: Lakes
    region: str

    @property
    def bucket(self) -> str:
        """Name of its bucket; "" for the service."""
        return self.target.bucket

    @property
    def key(self) -> str:
        """Key in the bucket; "" for the bucket itself."""
        return self.target.key

    def header(self, name: bytes) -> str:
        """Return a header as text, "" without one; bytes beyond ASCII as Latin-1, as HTTP has them."""
        return self.headers.get(name, b"").decode("latin-1")

    def parameter(self, name: str) -> str:
        """Return a parameter of the query, "" without one."""
        return self.target.parameters.get(name, "")

    async def ask(self, request: m.Request, reply: type[M]) -> M:
        """Send one request to the store and return its answer."""
        message = (await self.lakes.engine.call(request)).message
        assert isinstance(message, reply)
        return message

    async def ask_one(self, request: m.Request) -> m.ObjectStat:
        """Send a request about one name and return its stat; a failure is raised.  KeyNotFound if there is none."""
        return stat_of((await self.ask(request, m.NameResults)).results[0], self.key)


def stat_of(result: m.NameResult, key: str) -> m.ObjectStat:
    """Return the stat of one result of a batch, or raise its error."""
    if result.failure is not None:
        failure = result.failure
        raise failure.as_error()
    if result.stat is None:
        raise no_such_key(key)
    return result.stat


def whole_number(name: str, text: str, default: int, limit: int = 999_999_999) -> int:
    """Parse a count or position of a list; `default` for an empty text.  S3Error InvalidArgument."""
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= limit):
        raise invalid_argument(f"Provided {name} not an integer or within integer range", name, text[:64])
    return int(text)


def bad_part_number(text: str) -> S3Error:
    """Return a 400 InvalidArgument: no part has that number."""
    message = f"Part number must be an integer between 1 and {S3_PARTS_MAX}, inclusive"
    return invalid_argument(message, "partNumber", text)


def xml_response(document: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> Response:
    """Return a 200 with an XML body."""
    return Response(200, [XML, *headers], [document])


def lake_error(error: LakeError, call: Call) -> S3Error:
    """Return the store's error as S3's, about this request's resource."""
    return from_lake(error, f"/{call.bucket}/{call.key}" if call.key else f"/{call.bucket}")
