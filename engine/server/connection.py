"""One client's connection: a small team of tasks reads and serves its requests (`engine.server.leader_followers`).

The team's leader reads a request and serves it; as soon as serving has to wait, another task continues to read.

Rules kept here:
- When requests in flight and unsent replies reach `inflight_max`, the next request waits with its body unread, and
  nothing behind it is read.
- A request's body is received directly into the service's memory; from `serve` on the service releases it.
- A cancel frame or a deadline cancels the worker that serves the request.
- Every request gets its final frame, even when cancelled, unless the connection ends first.  Replies are passed to
  the sender without waiting.
- An error of one request never ends the connection; a broken frame does, after a last frame with the reason.
- `EngineService.disconnected` is called exactly once, whatever ended the connection.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import structlog
import trio

from engine.server.later import LaterReplies, given
from engine.server.leader_followers import Team, Worker
from engine.server.watches import ServedWatches
from lakefs.errors import DeadlineExceeded, EngineBusy, EngineUnreachable, InternalError, LakeError, ProtocolError
from lakefs.host.descriptors import close_all, close_later, duplicates
from lakefs.limits import BODY_BYTES_MAX, FRAME_TIMEOUT_S, HELLO_TIMEOUT_S, INFLIGHT_PER_CONNECTION
from lakefs.ports import Stream
from lakefs.transport.framing import FrameReceiver, FrameSender
from lakefs.wire.connection import (
    CancelReceived,
    RequestReceived,
    RequestRefused,
    ServerConnection,
    ServerEvent,
    farewell,
    goodbye,
)
from lakefs.wire.engine_port import NO_BODY, Body, EngineService, Reply, ServedClient
from lakefs.wire.frames import PROTOCOL_VERSION
from lakefs.wire.messages import Hello, HelloReply, PutObjects, Request, StoreChunks, Watch

_log: Final = structlog.get_logger(__name__)

_EVENTS_BETWEEN_CHECKPOINTS: Final = 64
_SMALL_REPLY_BYTES: Final = 8 * 1024
"""Replies up to this size are gathered while more requests are at hand."""
_FAREWELL_TIMEOUT_S: Final = 1.0
_LINGER_S: Final = 0.5
"""Time for a client to close its end after a goodbye."""
_BODY_REQUESTS: Final = (StoreChunks, PutObjects)


@dataclass(frozen=True)
class ServerLimits:
    """Bounds of one connection; tests make them small."""

    inflight_max: int = INFLIGHT_PER_CONNECTION
    hello_timeout_s: float = HELLO_TIMEOUT_S
    frame_timeout_s: float = FRAME_TIMEOUT_S


class _Job(msgspec.Struct, frozen=True, gc=False):
    """A request whose body was received."""

    stream_id: int
    request: Request
    body: Body
    descriptors: list[int]
    expires_at: float


class ServedConnection:
    """Serves one stream until the client leaves, breaks the protocol, or `close` is called.

    `uid` is that of the client's user, None if nobody knows it.  `let_in` is called when an untrusted client has shown
    the token; an error that it raises is sent as the reply.
    """

    def __init__(
        self,
        service: EngineService,
        stream: Stream,
        *,
        token: str | None,
        trusted: bool,
        limits: ServerLimits,
        uid: int | None,
        let_in: Callable[[ServedConnection], None],
    ) -> None:
        self._service = service
        self._stream = stream
        self._token = token
        self._trusted = trusted
        self._limits = limits
        self._uid = uid
        self._let_in = let_in
        self._wire = ServerConnection()
        self._sender = FrameSender(stream, on_room=self._notice)
        self._receiver = FrameReceiver[ServerEvent](
            stream, self._wire, frame_timeout_s=limits.frame_timeout_s, before_wait=self._sender.flush
        )
        self._client: ServedClient | None = None
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._team: Team[_Job] | None = None
        self._serving: dict[int, Worker] = {}
        self._later = LaterReplies(self._answer, self._later_ended)
        self._watches = ServedWatches(service, self._wire, self._sender, notice=self._notice, bug=self._unexpected)
        self._inflight = 0
        self._events = 0
        self._draining = False
        self._ended = trio.Event()
        self._noticed: trio.Event | None = None

    async def run(self) -> None:
        """Serve.  Returns when the connection has ended and `disconnected` has returned; raises only for bugs."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self._send)
                    if await self._greet():
                        self._team = Team(nursery, self._next_job, self._serve, self._sender.flush)
                        self._team.start()
                    else:
                        await self._leave()
        finally:
            self._ended.set()
            self._later.give_up_all()
            self._sender.drop_all()
            await self._stream.aclose()
            self._receiver.close()
            if self._client is not None:
                with trio.CancelScope(shield=True):
                    await self._service.disconnected(self._client)

    def turn_out(self, error: LakeError) -> None:
        """End the connection now; sends the reason if that needs no wait."""
        self._sender.send(farewell(error))
        self.close()

    def close(self) -> None:
        """End the connection now; cancels requests in flight."""
        self._scope.cancel()

    async def drain(self) -> None:
        """Send a goodbye, end watches, and wait until every request in flight has its reply.

        New requests are refused.  The client has a moment to close its end, so that requests it sent before it read
        the goodbye are refused too, not lost without a reply.
        """
        self._draining = True
        if self._client is None:
            return
        self._sender.send(goodbye())
        self._watches.end_all()
        while self._inflight or self._watches.count:
            await self._wait_notice()
        await self._sender.wait_sent()
        with trio.move_on_after(_LINGER_S):
            await self._ended.wait()

    # --- hello -------------------------------------------------------------------------------------

    async def _greet(self) -> bool:
        """Read the Hello and reply; True if it was accepted."""
        error: LakeError = DeadlineExceeded(
            f"Hello did not come within {self._limits.hello_timeout_s:g} s of connecting"
        )
        with trio.move_on_after(self._limits.hello_timeout_s):
            try:
                event = await self._receiver.next_event()
                if event is None:
                    return False
                if isinstance(event, RequestReceived) and isinstance(event.request, Hello):
                    return await self._hello(event.stream_id, event.request)
                error = ProtocolError("the first frame of a connection is Hello, and it has to be readable")
            except EngineUnreachable:
                return False
            except LakeError as raised:
                error = raised
        self._sender.cork(farewell(error))
        return False

    async def _hello(self, stream_id: int, hello: Hello) -> bool:
        try:
            self._wire.accept_hello(hello, token=self._token, trusted=self._trusted)
            if not self._trusted:
                self._let_in(self)
        except LakeError as error:
            _log.warning("hello_refused", peer=self._stream.peer, reason=error.message)
            self._fail(stream_id, error)
            return False
        carried = self._stream.carries_descriptors
        self._client = self._service.connected(
            self._stream.peer,
            descriptors=carried,
            trusted=self._trusted,
            uid=self._uid,
            has_left=self._stream.has_peer_left,
            end=self.close,
        )
        try:
            reply = await self._service.serve(self._client, hello, Body(), ())
        except LakeError as error:
            self._fail(stream_id, error)
            return False
        assert isinstance(reply.message, HelloReply), "Hello is answered with HelloReply"
        message = msgspec.structs.replace(
            reply.message,
            protocol=PROTOCOL_VERSION,
            inflight_max=self._limits.inflight_max,
            body_bytes_max=BODY_BYTES_MAX,
            descriptors=reply.message.descriptors and carried,
        )
        self._sender.send(self._wire.reply(stream_id, message))
        return True

    # --- sending -----------------------------------------------------------------------------------

    async def _send(self) -> None:
        try:
            await self._sender.run()
        except LakeError as error:
            _log.debug("connection_lost", peer=self._stream.peer, reason=error.message)
            self.close()

    async def _leave(self) -> None:
        """End the connection once queued frames are sent, or after _FAREWELL_TIMEOUT_S."""
        with trio.move_on_after(_FAREWELL_TIMEOUT_S):
            await self._sender.wait_sent()
        self.close()

    # --- reading -----------------------------------------------------------------------------------

    async def _next_job(self) -> _Job | None:
        """Return the next request to serve; None once the connection is being ended."""
        try:
            job = await self._lead()
        except EngineUnreachable:
            job = None
        except LakeError as error:
            _log.warning("connection_refused", peer=self._stream.peer, reason=error.message)
            self._sender.cork(farewell(error))
            await self._leave()
            return None
        if job is None:
            self.close()
        return job

    async def _lead(self) -> _Job | None:
        """Return the next request to serve; None when the client has finished.  LakeError: end the connection."""
        while True:
            while self._sender.queued >= self._limits.inflight_max:
                await self._wait_notice()
            self._events += 1
            if self._events % _EVENTS_BETWEEN_CHECKPOINTS == 0:
                await trio.lowlevel.checkpoint()
            event = await self._receiver.next_event()
            if event is None:
                return None
            if isinstance(event, RequestReceived):
                while self._inflight + self._sender.queued >= self._limits.inflight_max:
                    self._sender.flush()
                    await self._wait_notice()
                if self._sender.error is not None:
                    return None  # the reply could not be sent
                job = await self._accept(event)
                if job is not None:
                    return job
            elif isinstance(event, CancelReceived):
                self._cancel(event.stream_id)
            else:
                close_later(self._receiver.claim(event.descriptor_count))
                if isinstance(event, RequestRefused):
                    self._sender.cork(event.failure)

    async def _accept(self, event: RequestReceived) -> _Job | None:
        """Return the request with its body; None when it has its reply already."""
        expires_at = trio.current_time() + event.deadline_ms / 1000 if event.deadline_ms else math.inf
        descriptors = self._receiver.claim(event.descriptor_count) if event.descriptor_count else []
        accepted = False
        self._inflight += 1
        try:
            body = await self._body_of(event, descriptors)
            accepted = body is not None
        finally:
            if not accepted:
                self._inflight -= 1
                close_later(descriptors)
        return _Job(event.stream_id, event.request, body, descriptors, expires_at) if body is not None else None

    async def _body_of(self, event: RequestReceived, descriptors: list[int]) -> Body | None:
        try:
            self._check(event, descriptors)
            if isinstance(event.request, Watch):
                assert self._client is not None, "a greeted client is connected"
                assert self._nursery is not None, "the team is at work"
                self._watches.start(self._nursery, self._client, event.stream_id, event.request)
                return None
            if not event.body_bytes and not isinstance(event.request, _BODY_REQUESTS):
                return Body()
            assert self._client is not None, "a greeted client is connected"
            body = await self._service.receive(self._client, event.request, event.body_bytes)
        except LakeError as error:
            self._refuse(event, error)
            return None
        except Exception as error:  # noqa: BLE001 - a bug of the service fails this request only
            self._refuse(event, self._unexpected(event.request, error))
            return None
        try:
            await self._receiver.fill(body.parts)
        except BaseException:
            body.release()
            raise
        return body

    def _check(self, event: RequestReceived, descriptors: list[int]) -> None:
        if self._draining:
            raise EngineBusy("the engine is shutting down; connect again in a moment")
        if len(descriptors) < event.descriptor_count:
            raise EngineBusy(
                f"{event.descriptor_count} descriptors were announced and {len(descriptors)} arrived; "
                "the engine may be out of descriptors: try again, or raise its LimitNOFILE"
            )

    # --- serving -----------------------------------------------------------------------------------

    async def _serve(self, job: _Job, worker: Worker) -> None:
        stream_id = job.stream_id
        self._serving[stream_id] = worker
        if job.expires_at != math.inf:
            worker.scope.deadline = job.expires_at
        assert self._client is not None, "a greeted client is connected"
        assert self._team is not None, "the team is at work"
        try:
            reply = await self._service.serve(self._client, job.request, job.body, job.descriptors)
            if reply.later is not None and job.expires_at != math.inf:
                reply = await given(reply.later)
            if reply.later is not None:
                self._inflight += 1
                self._later.expect(stream_id, reply.later)
                return
            self._answer(stream_id, reply)
            if reply.then is not None:
                self._do_after(reply.then)
        except LakeError as error:
            self._fail(stream_id, error)
        except Exception as error:  # noqa: BLE001 - a bug of the service fails this request only
            self._fail(stream_id, self._unexpected(job.request, error))
        except BaseException:  # Cancelled, or a nursery's group around it
            if trio.current_time() >= job.expires_at:
                self._fail(
                    stream_id, DeadlineExceeded("the request's deadline passed; it may or may not have been done")
                )
            elif worker.scope.cancel_called:  # else the connection ends
                self._sender.cork(self._wire.end(stream_id))
            raise
        finally:
            del self._serving[stream_id]
            if job.expires_at != math.inf:
                worker.scope.deadline = math.inf
            self._inflight -= 1
            assert self._inflight >= 0
            if not self._team.leads(worker):
                self._sender.flush()
            self._notice()

    def _answer(self, stream_id: int, reply: Reply) -> None:
        """Pass a reply to the sender.  Its body is released here or by the sender, once."""
        body = reply.body
        body_bytes = body.nbytes if body.parts else 0
        descriptors: list[int] = []
        try:
            if reply.descriptors:
                # Copies: the service may close its own before a slow client has taken the frame.
                descriptors = duplicates(reply.descriptors)
            frame = self._wire.reply(stream_id, reply.message, body_bytes, len(descriptors))
        except BaseException:
            _sent_with(descriptors, body)
            raise
        if descriptors:
            self._sender.send(frame, body.parts, descriptors, lambda: _sent_with(descriptors, body))
        elif body_bytes > _SMALL_REPLY_BYTES:
            self._sender.send(frame, body.parts, (), body.release)
        else:
            self._sender.cork(b"".join((frame, *body.parts)) if body_bytes else frame)
            if body is not NO_BODY:
                body.release()

    def _later_ended(self) -> None:
        self._sender.flush()
        self._inflight -= 1
        self._notice()

    def _do_after(self, work: Callable[[], None]) -> None:
        """Do work that the reply did not need; the reply is sent first, unless more requests are at hand."""
        if not self._wire.reader.buffered_bytes:
            self._sender.flush()
        try:
            work()
        except Exception:  # noqa: BLE001 - a bug, and the request has its reply
            _log.exception("work_behind_failed", peer=self._stream.peer)

    def _cancel(self, stream_id: int) -> None:
        worker = self._serving.get(stream_id)
        if worker is not None:
            worker.scope.cancel()
        if self._later.give_up(stream_id):
            self._sender.cork(self._wire.end(stream_id))
        self._watches.cancel(stream_id)

    def _refuse(self, event: RequestReceived, error: LakeError) -> None:
        if event.body_bytes:
            self._wire.reader.skip_body()
        self._fail(event.stream_id, error)

    def _fail(self, stream_id: int, error: LakeError) -> None:
        self._sender.cork(self._wire.failure(stream_id, error))

    def _unexpected(self, request: Request, error: Exception) -> LakeError:
        name = type(request).__name__
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            _log.warning("out_of_memory", request=name, peer=self._stream.peer)
            return EngineBusy(f"the engine's machine has no memory for {name}; try again when it has some")
        _log.error("request_failed", request=name, peer=self._stream.peer, exc_info=error)
        return InternalError(f"{name} failed for a reason that is a bug; the engine's log has the details")

    def _notice(self) -> None:
        """Wake tasks that wait for a request to end or a frame to be sent."""
        if self._noticed is not None:
            self._noticed.set()
            self._noticed = None

    async def _wait_notice(self) -> None:
        if self._noticed is None:
            self._noticed = trio.Event()
        await self._noticed.wait()


def _sent_with(descriptors: Sequence[int], body: Body) -> None:
    close_all(descriptors)
    body.release()
