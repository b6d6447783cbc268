"""`lake` with one bug in its gateway: `python -m tests.door.planted_lake BUG gateway ...`.

For the tests that show that a check can fail.  Some bugs are those that a door may have; they are planted in the Python
path, so they need no door.  Those of gathered PUTs do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from tests.crash import small_lake
from tests.door import brief_lake

_LONG_S: Final = 10.0
_HOARD_BYTES: Final = 256 << 10


def _remember(*, ignored: tuple[bytes, ...] = (), after_removal: bool = False, any_query: bool = False) -> None:
    """Answer with the first good answer to the same request, for ever; the caller is still checked.

    `ignored`: headers that do not count as part of the request; with `any_query` its query does not, either.
    `after_removal`: also when the object is missing.
    """
    from gateway.http.messages import Request, Response
    from gateway.s3.dispatch import S3Service

    kept: dict[object, Response] = {}
    handle = S3Service.handle
    own = (b"authorization", b"x-amz-date", *ignored)

    async def remembering(service: S3Service, request: Request) -> Response:
        response = await handle(service, request)
        head = request.head
        headers = frozenset((name, value) for name, value in head.headers.items() if name not in own)
        asked = (head.method, head.authority, head.path if any_query else head.target, headers)
        is_good = response.status in (200, 206) or (after_removal and response.status == 404 and asked in kept)
        if head.method not in ("GET", "HEAD") or not is_good or response.stream is not None:
            return response
        first = kept.setdefault(asked, response)
        return replace(first, headers=[response.headers[0], *first.headers[1:]])

    S3Service.handle = remembering  # type: ignore[method-assign,assignment]


def _any_signature() -> None:
    """Take any signature for a good one."""
    import hmac

    hmac.compare_digest = lambda one, other: True


def _any_bucket() -> None:
    """Let a key read in any bucket."""
    from gateway.s3.request import authorization

    authorization.check_bucket = lambda key, bucket: None


def _keys_for_long() -> None:
    """Read the access keys again only after ten seconds."""
    from gateway.s3.request.authorization import KnownKeys

    KnownKeys.are_old = property(lambda keys: time.monotonic() - keys._read_at >= _LONG_S)  # type: ignore[method-assign,assignment]


def _strangers_for_long() -> None:
    """Ask only once whether a bucket is open to strangers."""
    from gateway.s3.request import authorization

    known: dict[str, bool] = {}
    ask = authorization._is_public

    async def once(engine: Any, bucket: str) -> bool:
        if bucket not in known:
            known[bucket] = await ask(engine, bucket)
        return known[bucket]

    authorization._is_public = once


def _lose_a_byte_between_pieces() -> None:
    """Lose the last byte of the first piece of a head whose first piece is of 20 to 30 bytes."""
    from gateway.http.connection import Connection

    make_room = Connection._make_room

    def losing(connection: Connection) -> None:
        make_room(connection)
        if 20 <= connection._end <= 30:
            connection._end -= 1

    Connection._make_room = losing  # type: ignore[method-assign,assignment]


def _answer_one_twice() -> None:
    """Take the fifth of requests that arrived together for the sixth as well."""
    from gateway.http.connection import Connection
    from gateway.http.head import RequestHead

    read = Connection._head

    async def doubling(connection: Connection) -> RequestHead | None:
        kept = connection.__dict__
        kept["in_a_row"] = kept.get("in_a_row", 0) + 1 if connection.has_buffered else 0
        head = await read(connection)
        if head is not None and head.method == "GET" and kept["in_a_row"] == 5:
            return kept.get("before", head)  # type: ignore[no-any-return]
        kept["before"] = head if head is not None and head.method == "GET" else kept.get("before", head)
        return head

    Connection._head = doubling  # type: ignore[method-assign,assignment]


def _answer_garbage_late() -> None:
    """Take bytes that no request begins with for the beginning of a head."""
    from gateway.http.head import HeadWatch

    HeadWatch.feed = lambda watch, piece: None  # type: ignore[method-assign,assignment]


def _forget_the_position() -> None:
    """Send a byte again where the client took only a part of a piece."""
    from gateway.http.connection import _Counted

    send = _Counted.send_nowait

    def forgetful(sender: _Counted, parts: Sequence[Any]) -> int:
        count = send(sender, parts)
        return count - 1 if 0 < count < sum(map(len, parts)) else count

    _Counted.send_nowait = forgetful  # type: ignore[method-assign,assignment]


def _never_sweep() -> None:
    """End no connection that is past its deadline."""
    from gateway.http import server

    server._SWEEP_S = 1e9  # type: ignore[misc]


def _never_refresh_the_deadline() -> None:
    """Count the idle time from the begin of the connection."""
    from gateway.http.connection import Connection

    def fixed(connection: Connection, value: float) -> None:
        connection.__dict__.setdefault("ends_at", value)

    Connection.deadline = property(lambda connection: connection.__dict__["ends_at"], fixed)  # type: ignore[assignment]


def _keep_idle_connections_at_the_end() -> None:
    """Let a drain wait for connections that are idle."""
    from gateway.http.connection import Connection

    end = Connection.end

    async def kept(connection: Connection) -> None:
        if not connection.is_idle:
            await end(connection)

    Connection.end = kept  # type: ignore[method-assign,assignment]


def _end_answers_at_the_end() -> None:
    """Break off answers under way when the process stops."""
    from gateway.http.server import HttpServer

    drain = HttpServer.drain

    async def hasty(server: HttpServer, timeout_s: float) -> None:
        await drain(server, 0.0)

    HttpServer.drain = hasty  # type: ignore[method-assign,assignment]


def _hoard() -> None:
    """Give each connection a quarter of a MiB."""
    from gateway.http.connection import Connection

    begin = Connection.__init__

    def hoarding(connection: Connection, *arguments: Any) -> None:
        begin(connection, *arguments)
        connection.__dict__["hoard"] = os.urandom(_HOARD_BYTES)

    Connection.__init__ = hoarding  # type: ignore[method-assign,assignment]


def _keep_tasks() -> None:
    """Let every connection that waits at the door keep its task."""
    from gateway.http import door
    from gateway.http.server import HttpServer

    vars(door)["_TASKS_MAX"] = 1 << 20
    HttpServer._adopted = lambda server, stream: False  # type: ignore[method-assign,assignment]


def _forget_the_dormant_at_the_end() -> None:
    """Let a drain wait for connections without a task."""
    from gateway.http.server import HttpServer

    HttpServer._finish_dormant = lambda server: None  # type: ignore[method-assign,assignment]


def _keep_the_dormant() -> None:
    """End no connection without a task, however long it is idle."""
    from gateway.http.door import Door

    Door.end = lambda door, descriptor: False  # type: ignore[method-assign,assignment]


def _lose_what_a_task_begins_with() -> None:
    """Forget the last byte that the door had received from a connection without a task."""
    from gateway.http.connection import Connection
    from gateway.http.door import HandedOver

    serve = Connection.serve

    async def losing(connection: Connection, handed: HandedOver | None = None) -> None:
        if handed is not None and handed.received is not None:
            handed = handed._replace(received=handed.received[:-1])
        await serve(connection, handed)

    Connection.serve = losing  # type: ignore[method-assign,assignment]


def _never_check() -> None:
    """Send content without a look at its checksums."""
    from gateway.s3.request import content
    from lakefs.grants import grant_reads

    content.matches = lambda *_: True  # type: ignore[attr-defined]
    grant_reads._check_granules = lambda *_: None


def _puts_without_type() -> None:
    """Forget the content type of PUTs that were gathered."""
    from gateway.s3.door._repeater import Put
    from gateway.s3.operations.gathered import GatheredPuts
    from lakefs.wire.messages import NameChange

    read = GatheredPuts._change

    def forgetful(puts: GatheredPuts, put: Put) -> NameChange | None:
        change = read(puts, put)
        if change is not None:
            msgspec.structs.force_setattr(change.attributes, "content_type", "x")
        return change

    GatheredPuts._change = forgetful  # type: ignore[method-assign,assignment]


def _puts_by_anybody() -> None:
    """Let any key write, in any bucket, what was gathered."""
    from gateway.s3.operations import gathered

    vars(gathered)["check_key"] = lambda key, target: None


def _puts_of_another() -> None:
    """Say the wrong ETag of a PUT that was gathered."""
    from gateway.s3.operations import gathered

    vars(gathered)["put_headers"] = lambda stat: [(b"ETag", b'"%b"' % stat.etag[::-1].encode())]


def _early_puts() -> None:
    """Answer PUTs that were gathered before they are durable."""
    from gateway.s3.operations import gathered
    from lakefs.wire.messages import PutObjects

    vars(gathered)["PutObjects"] = lambda lengths, changes, stamps: PutObjects(lengths, changes, False, stamps)


def _without_stamps() -> None:
    """Run an engine that has no stamps, and says so: no bug."""
    from engine.metadata.metadata_store import Metadata
    from engine.metadata.stamps import Stamps

    def forget(metadata: Metadata, stamps: Stamps | None) -> None: ...

    Metadata.use_stamps = forget  # type: ignore[method-assign, assignment]


BUGS: Final[dict[str, Callable[[], None]]] = {
    "without-stamps": _without_stamps,
    "stale": _remember,
    "stale-after-removal": lambda: _remember(after_removal=True),
    "any-range": lambda: _remember(ignored=(b"range",)),
    "any-condition": lambda: _remember(ignored=(b"if-match", b"if-none-match")),
    "any-query": lambda: _remember(any_query=True),
    "any-signature": _any_signature,
    "any-bucket": _any_bucket,
    "keys-for-long": _keys_for_long,
    "strangers-for-long": _strangers_for_long,
    "lost-byte": _lose_a_byte_between_pieces,
    "doubled-request": _answer_one_twice,
    "late-garbage": _answer_garbage_late,
    "forgotten-position": _forget_the_position,
    "no-sweep": _never_sweep,
    "fixed-deadline": _never_refresh_the_deadline,
    "idle-kept": _keep_idle_connections_at_the_end,
    "hasty-end": _end_answers_at_the_end,
    "hoard": _hoard,
    "tasks-kept": _keep_tasks,
    "dormant-left": _forget_the_dormant_at_the_end,
    "dormant-kept": _keep_the_dormant,
    "dormant-byte": _lose_what_a_task_begins_with,
    "no-check": _never_check,
    "puts-without-type": _puts_without_type,
    "puts-by-anybody": _puts_by_anybody,
    "puts-of-another": _puts_of_another,
    "early-puts": _early_puts,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["brief"]:
        sys.argv.pop(1)
        brief_lake.make_brief()
    BUGS[sys.argv.pop(1)]()
    small_lake.be_lake()
