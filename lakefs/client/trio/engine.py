"""The trio client of one engine: `connect_engine(address)` yields an `EngineClient`.

Calls of many tasks share one connection.  One task receives all frames and wakes the caller that each one answers.

Rules kept here:
- At most `inflight_max` streams are open; the next caller waits.  A cancelled call's stream counts until its final
  frame has arrived.
- A caller's memory (request body, `into`) is not touched after its call has ended: a call that is cancelled while
  its frame is sent, or its reply received into `into`, ends when that is over (at most 30 s).
- A connection that is lost is shut down in the same step: the engine binds nothing from slots of callers after that.
  A call whose reply is being received ends when the receiving task has: until then its `into` may be written to.
- When the connection is lost, every pending and every later call raises EngineUnreachable; nothing is retried here.
  A draining engine finishes the requests in flight; later calls raise EngineBusy.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NoReturn

import outcome
import trio

from lakefs.client.silence import Asked, Silence, silent_error
from lakefs.client.trio.calls import Answered, Call
from lakefs.client.trio.watch_events import WatchEvents, again
from lakefs.errors import EngineBusy, EngineUnreachable, InvalidArgument, LakeError
from lakefs.host.descriptors import close_all
from lakefs.ids import Buffer
from lakefs.limits import FRAME_TIMEOUT_S, HELLO_TIMEOUT_S
from lakefs.ports import Network, Stream
from lakefs.transport.framing import FrameReceiver, FrameSender
from lakefs.transport.sockets import lost_error
from lakefs.transport.streams import TrioNetwork
from lakefs.wire.connection import (
    ClientConnection,
    ClientEvent,
    EventReceived,
    FailureReceived,
    GoodbyeReceived,
    ReplyReceived,
    StreamEnded,
    check_hello_reply,
    reply_memory,
)
from lakefs.wire.engine_port import Body, Reply
from lakefs.wire.frames import PROTOCOL_VERSION
from lakefs.wire.given_leases import given_leases
from lakefs.wire.messages import CloseLeases, Hello, HelloReply, Ping, Request, Watch
from lakefs.wire.offers import Offers

CLIENT_NAME: Final = "lakefs-python"


@asynccontextmanager
async def connect_engine(
    address: str, *, token: str = "", network: Network | None = None
) -> AsyncIterator[RemoteEngine]:
    """Connect to an engine and say Hello; the connection ends with the block.

    EngineUnreachable, PermissionDenied, UnsupportedVersion, EngineBusy.
    """
    stream = await (network or TrioNetwork()).connect(address)
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            engine = RemoteEngine(stream, address)
            nursery.start_soon(engine.read)
            nursery.start_soon(engine.write)
            try:
                await engine.greet(token)
                yield engine
            except BaseException as error:  # noqa: BLE001 - raised below: not wrapped in the nursery's group
                failure = error
            nursery.cancel_scope.cancel()
    finally:
        engine.lose(EngineUnreachable(f"the connection to {address} was closed", subject=address))
        await stream.aclose()
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # no cycle of frame and traceback


class RemoteEngine:
    """An `EngineClient` over one connection.  Made by `connect_engine`."""

    epoch = 0

    def __init__(self, stream: Stream, address: str) -> None:
        self.address = address
        self._stream = stream
        self._wire = ClientConnection()
        self._sender = FrameSender(stream)
        self._receiver = FrameReceiver[ClientEvent](
            stream, self._wire, frame_timeout_s=FRAME_TIMEOUT_S, before_wait=self._sender.flush
        )
        self._calls: dict[int, Call] = {}
        self._watches: dict[int, WatchEvents] = {}
        self._slots = trio.lowlevel.ParkingLot()
        self._hello: HelloReply | None = None
        self.offers = Offers()
        """See `EngineClient.offers`."""
        self._lost: LakeError | None = None
        self._reading = trio.CancelScope()
        self._ended = trio.Event()
        self._idle = trio.Event()
        self.draining = False
        self.leaves_into = False
        """True if a call that is cancelled ends at once though its reply is being received into the caller's `into`,
        which may be written to after that."""

    @property
    def hello(self) -> HelloReply:
        """The engine's answer to Hello: store id, boot id, limits."""
        assert self._hello is not None, "connect_engine has greeted the engine"
        return self._hello

    @property
    def carries_descriptors(self) -> bool:
        """See `EngineClient.carries_descriptors`."""
        return self._stream.carries_descriptors and self.hello.descriptors

    @property
    def lost(self) -> LakeError | None:
        """Error that ended the connection; None while it is open."""
        return self._lost

    def is_connected(self) -> bool:
        """Return True if the connection is open; sees an end that the reader has not reached yet.  A system call."""
        if self._lost is None and self._stream.is_at_end():
            self.lose(lost_error(self.address))
        return self._lost is None

    async def wait_ended(self) -> None:
        """Wait until the connection is lost or the engine says goodbye."""
        await self._ended.wait()

    async def end_when_silent(self, silence_s: float) -> None:
        """End the connection once requests wait and the engine has been silent for that long (`Silence`)."""
        silence = Silence(silence_s)
        while self._lost is None:
            began = trio.current_time()
            await trio.sleep(silence.wait_s)
            for _ in range(2):  # what has arrived by now is read first
                await trio.lowlevel.checkpoint()
            if not self._calls or trio.current_time() - began > 2 * silence.wait_s:
                silence.begin_anew()  # nobody waits, or this process was stopped: what has arrived is read first
            elif silence.is_over(self._signs, silence.wait_s, self._ask):
                self.lose(silent_error(self.address, silence_s))

    @property
    def _signs(self) -> int:
        """Signs of the engine's life so far."""
        return self._receiver.arrivals + self._sender.taken

    def tell(self, request: Request) -> bool:
        """See `EngineClient.tell`."""
        if self._lost is not None or self.draining or self._calls or self._sender.queued:
            return False
        self._send_unawaited(request)
        return True

    def _ask(self) -> Asked:
        """Send a Ping, behind the frames that the engine has not taken yet."""
        if self._is_full:
            return Asked.NOT_NOW
        self._send_unawaited(Ping())
        return Asked.SENT

    def _send_unawaited(self, request: Request) -> None:
        stream_id, frame = self._wire.request(request)
        call = self._calls[stream_id] = Call(None, ())
        self._sender.send(frame, (), (), partial(self._sent, stream_id, call))

    async def wait_idle(self) -> None:
        """Wait until no request is in flight, or the connection is lost."""
        while self._lost is None and self._wire.open_count:
            self._idle = trio.Event()
            await self._idle.wait()

    async def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """See `EngineClient.call`.

        EngineUnreachable if the connection is lost; the request may or may not have been done.
        """
        await self._wait_slot()
        stream_id, call = self._begin(request, body, descriptors, into)
        return await self._end(stream_id, call)

    def begin(self, request: Request, into: Sequence[memoryview], done: Answered) -> Callable[[], None] | None:
        """Send a request without waiting: `done` gets the answer in a later step.

        Returns a call that gives the answer up: the engine may end early, and `into` may still be written to after
        that.  None if nothing was sent: the connection takes no further request now.
        """
        if self._lost is not None or self.draining or self._is_full:
            return None
        stream_id, frame = self._wire.request(request)
        call = self._calls[stream_id] = Call(None, into, done)
        self._sender.send(frame, (), (), partial(self._sent, stream_id, call))
        return partial(self._abandon, stream_id, call)

    @asynccontextmanager
    async def watch(self, bucket: str, *, others_only: bool = False) -> AsyncIterator[WatchEvents]:
        """Watch a bucket from now on: `async for event in events`.  The events end when the engine drains."""
        await self._wait_slot()
        events = WatchEvents()
        stream_id, call = self._begin(Watch(bucket, others_only))
        self._watches[stream_id] = events
        try:
            await self._end(stream_id, call)
            yield events
        finally:
            del self._watches[stream_id]
            if self._wire.is_open(stream_id):
                self._sender.send(self._wire.cancel(stream_id))

    # --- for connect_engine ------------------------------------------------------------------------

    async def greet(self, token: str) -> None:
        """Say Hello and keep the answer."""
        with trio.move_on_after(HELLO_TIMEOUT_S):
            reply = await self._end(*self._begin(Hello(PROTOCOL_VERSION, CLIENT_NAME, 0, token)))
            assert isinstance(reply.message, HelloReply), "Hello is answered with HelloReply"
            check_hello_reply(reply.message)
            self._hello = reply.message
            self.offers.take(self._hello.features, by_memory=self.carries_descriptors)
            return
        raise EngineUnreachable(
            f"{self.address} takes connections but does not answer; is it an engine?", subject=self.address
        )

    async def read(self) -> None:
        """Receive and dispatch until the connection is lost, which raises nothing here."""
        try:
            with self._reading:
                while (event := await self._receiver.next_event()) is not None:
                    if self._lost is not None:
                        return  # its caller has got the error of the lost connection
                    await self._dispatch(event)
                self.lose(lost_error(self.address))
        except LakeError as error:
            self.lose(error)
        finally:
            # Also when cancelled: no task reads answers any more, and callers may wait under a shield.
            self.lose(lost_error(self.address))
            self._receiver.close()  # descriptors that arrived after the loss
            self._wake_all()

    async def write(self) -> None:
        """Send what could not be sent at once, until the connection is lost, which raises nothing here."""
        try:
            await self._sender.run()
        except EngineUnreachable:
            return  # the engine may have said why before it closed: the reader finds that, then the end
        except LakeError as error:
            self.lose(error)

    def lose(self, error: LakeError) -> None:
        """End the connection: every waiting call and watch gets the error.  Does nothing the second time."""
        if self._lost is not None:
            return
        if self._hello is not None and not isinstance(error, EngineUnreachable):
            error = EngineUnreachable(f"the connection to {self.address} had to end: {error.message}")
        self._lost = error
        self._stream.send_end()  # before a caller goes on: from now on the engine takes nothing from its slots
        self._ended.set()
        self._idle.set()
        self._sender.drop_all()
        self._receiver.close()
        self._wake_all(but_receiving=True)
        self._reading.cancel()
        for events in self._watches.values():
            events.end(error)
        self._slots.unpark_all()

    def _wake_all(self, *, but_receiving: bool = False) -> None:
        """Give every call the error of the lost connection; the one whose reply is being received may be left out."""
        assert self._lost is not None, "called when the connection is lost"
        left = {stream_id: call for stream_id, call in self._calls.items() if but_receiving and call.receiving}
        for stream_id, call in self._calls.items():
            if stream_id not in left:
                call.wake(outcome.Error(again(self._lost)))
        self._calls = left

    # --- one call ----------------------------------------------------------------------------------

    async def _wait_slot(self) -> None:
        while self._lost is None and self._is_full:
            await self._slots.park()

    @property
    def _is_full(self) -> bool:
        """True if as many requests are in flight as the engine takes."""
        return self._wire.open_count - len(self._watches) >= self.hello.inflight_max

    def _begin(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        into: Sequence[memoryview] = (),
    ) -> tuple[int, Call]:
        """Send or queue a request, without a checkpoint; return its stream and call."""
        if self._lost is not None:
            raise again(self._lost)
        if self.draining:
            raise EngineBusy(f"the engine at {self.address} is shutting down", subject=self.address)
        if descriptors and not self.carries_descriptors:
            raise InvalidArgument(f"descriptors cannot be sent to {self.address}", subject=self.address)
        body_bytes = sum(map(len, body)) if body else 0
        stream_id, frame = self._wire.request(request, body_bytes, len(descriptors))
        call = Call(trio.lowlevel.current_task(), into)
        self._calls[stream_id] = call
        self._sender.send(frame, body, descriptors, partial(self._sent, stream_id, call))
        return stream_id, call

    async def _end(self, stream_id: int, call: Call) -> Reply:
        """Wait for the final frame; return the reply."""

        def abort(raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
            if call.sent and (not call.receiving or self.leaves_into):
                self._abandon(stream_id, call)
                return trio.lowlevel.Abort.SUCCEEDED
            call.raise_cancel = raise_cancel
            return trio.lowlevel.Abort.FAILED

        reply: Reply = await trio.lowlevel.wait_task_rescheduled(abort)
        return reply

    def _sent(self, stream_id: int, call: Call) -> None:
        """Note that the kernel has the request: a call that was cancelled may end now."""
        call.sent = True
        if call.raise_cancel is not None:
            call.wake(outcome.capture(call.raise_cancel))
            self._abandon(stream_id, call)

    def _abandon(self, stream_id: int, call: Call) -> None:
        call.forget()
        if self._lost is None and self._wire.is_open(stream_id):
            self._sender.send(self._wire.cancel(stream_id))

    # --- frames of the engine ----------------------------------------------------------------------

    async def _dispatch(self, event: ClientEvent) -> None:
        if isinstance(event, ReplyReceived):
            await self._replied(event)
        elif isinstance(event, EventReceived):
            watch = self._watches.get(event.stream_id)
            if watch is not None:
                watch.add(event.event)
        elif isinstance(event, FailureReceived):
            self._ended_with(event.stream_id, event.error)
        elif isinstance(event, StreamEnded):
            self._ended_with(event.stream_id, None)
        elif isinstance(event, GoodbyeReceived):
            self.draining = True
            self._ended.set()
        else:
            close_all(self._receiver.claim(event.descriptor_count))

    async def _replied(self, event: ReplyReceived) -> None:
        call = self._calls[event.stream_id]
        descriptors = self._receiver.claim(event.descriptor_count)
        parts: Sequence[Buffer] = ()
        try:
            if event.body_bytes and not call.is_awaited:
                self._wire.reader.skip_body()
            elif event.body_bytes:
                own, parts = reply_memory(call.into, event.body_bytes)
                call.receiving = not own
                await self._receiver.fill(parts)
        except BaseException:
            close_all(descriptors)
            raise
        self._calls.pop(event.stream_id, None)  # it is gone if the connection was lost during the receipt
        if len(descriptors) < event.descriptor_count:
            result: outcome.Outcome[Reply] = outcome.Error(
                EngineBusy("descriptors that the engine sent did not arrive; raise the limit of open files")
            )
        else:
            result = outcome.Value(Reply(event.message, Body(parts), descriptors))
        if not call.wake(result):
            close_all(descriptors)
            if (leases := given_leases(event.message)) and self._lost is None:
                self._send_unawaited(CloseLeases(leases))
        elif isinstance(result, outcome.Error):
            close_all(descriptors)
        self._stream_ended()

    def _ended_with(self, stream_id: int, error: LakeError | None) -> None:
        call = self._calls.pop(stream_id, None)
        if call is not None:
            ended = error or EngineUnreachable("the engine ended the request without an answer")
            call.wake(outcome.Error(ended))
        watch = self._watches.get(stream_id)
        if watch is not None:
            watch.end(error)
        self._stream_ended()

    def _stream_ended(self) -> None:
        self._slots.unpark()
        if not self._wire.open_count:
            self._idle.set()
