"""`EtcdLink`: calls of one process to an etcd of several endpoints.

    answer = await link.ask(RANGE, request)             a request that may be repeated
    answer, is_repeat = await link.ask_each(TXN, make)  one whose repeats differ: make(is_repeat) for each try

Rules kept here:
- One endpoint is in use.  When it is away, silent or without a leader, another one is, for calls and watches: the next
  that was heard within ETCD_LOOK_S, else the next, round and round, until ETCD_CALL_S have passed since the call began:
  EngineUnreachable.  While all of them refuse the connection, a call ends after ETCD_REFUSED_S.
- Processes begin at different endpoints, so that those of a lake spread over all.
- A try waits ETCD_TRY_S, and longer from the fourth on: a request that takes long is not repeated for ever.
- While an answer is late, all endpoints are asked if there is another leader (`look_around`).  When one has said so,
  what was sent before counts as lost, and is sent again, to that one.
- An endpoint with a stream that is silent is asked for a sign of life (`keep_heard`); without one it is left, and its
  streams end.  Pings of gRPC take longer: 9 s.
- Only a status that says that nothing was done (`Status.is_open` is False) ends a call as its answer.
- A call that is cancelled waits ETCD_CANCEL_S for the answer of a change that is under way, so that a change that etcd
  will do is done, nearly always, when the call returns.
- An answer of another etcd than the one that is meant is EngineUnreachable: what it has is not this lake's.
- Password and token are in no message and no log.

Callbacks of gRPC run in its own threads; they only wake the loop.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import grpc
import structlog
import trio

from engine.etcd import etcd_messages as e
from engine.etcd.calls_under_way import CallsUnderWay
from engine.etcd.etcd_bounds import (
    ETCD_ANSWER_BYTES_MAX,
    ETCD_CALL_S,
    ETCD_CANCEL_S,
    ETCD_LATE_S,
    ETCD_LOOK_S,
    ETCD_PAUSE_S,
    ETCD_QUICK_TRIES,
    ETCD_REFUSED_S,
    ETCD_TRY_S,
)
from engine.etcd.etcd_status import Status, error_of, status_of
from engine.etcd.etcd_streams import read_answers
from lakefs.errors import ConfigError, EngineUnreachable

_log: Final = structlog.get_logger(__name__)
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", ETCD_ANSWER_BYTES_MAX),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # etcd ends connections that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    # Else each ping has 60 s, those of keep-alive too: a silent connection was lost after 60 to 66 s (gRPC 1.85).
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
)
_NEEDS_LEADER: Final = ("hasleader", "true")
OVERTAKEN: Final = Status(grpc.StatusCode.UNAVAILABLE, "another leader was elected before it answered")
_NO_TOKEN: Final = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "there was no token in time")
_TOKENS_MAX: Final = 3
"""Tokens tried for one call: each may be refused because users were changed in the meantime."""


class Method(NamedTuple):
    """A method of etcd, and the class of its answers."""

    path: str
    answer: Any


RANGE: Final = Method("/etcdserverpb.KV/Range", e.RangeResponse)
TXN: Final = Method("/etcdserverpb.KV/Txn", e.TxnResponse)
COMPACT: Final = Method("/etcdserverpb.KV/Compact", e.CompactResponse)
WATCH: Final = Method("/etcdserverpb.Watch/Watch", e.WatchResponse)
GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", e.GrantResponse)
REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", e.RevokeResponse)
KEEP_ALIVE: Final = Method("/etcdserverpb.Lease/LeaseKeepAlive", e.KeepAliveResponse)
DEFRAGMENT: Final = Method("/etcdserverpb.Maintenance/Defragment", e.DefragmentResponse)
ALARM: Final = Method("/etcdserverpb.Maintenance/Alarm", e.AlarmResponse)
_AUTHENTICATE: Final = Method("/etcdserverpb.Auth/Authenticate", e.AuthenticateResponse)


@dataclass(frozen=True)
class EtcdAccess:
    """Where an etcd is, and what it asks for.

    `endpoints` are URLs, `http://HOST:PORT` or `https://HOST:PORT`, in the order in which they are tried, round and
    round.  `first` is the number of the one to begin with (None: any).  PEM texts: `ca` (None: the system's),
    `certificate` and `key` of this client.  `cluster` is the id of the only etcd that is meant; 0: any.
    """

    endpoints: tuple[str, ...]
    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    user: str = ""
    password: str = field(default="", repr=False)
    cluster: int = 0
    first: int | None = None


class Endpoint:
    """One endpoint, with its connection, and the streams that are open there."""

    def __init__(self, url: str, access: EtcdAccess) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or "@" in parts.netloc:
            raise ConfigError("an endpoint of etcd is a URL, http://HOST:PORT or https://HOST:PORT", subject=url)
        self.address: Final = parts.netloc
        self.streams: Final[dict[Any, None]] = {}
        """Calls of `open_stream`; they are cancelled when the endpoint is silent."""
        self.heard_at = -math.inf
        """When something arrived from it last, on trio's clock."""
        self.asked_at = -math.inf
        """When a stream had it asked for a sign of life."""
        if parts.scheme == "https":
            credentials = grpc.ssl_channel_credentials(access.ca, access.key, access.certificate)
            self.channel = grpc.secure_channel(self.address, credentials, options=_OPTIONS)
        else:
            self.channel = grpc.insecure_channel(self.address, options=_OPTIONS)
        self._senders: dict[Method, Any] = {}

    def sender(self, method: Method) -> Any:
        """Return the callable of gRPC for a method with one answer; making one takes as long as a call."""
        if method not in self._senders:
            self._senders[method] = self.channel.unary_unary(
                method.path, request_serializer=_serialized, response_deserializer=method.answer.FromString
            )
        return self._senders[method]


class EtcdLink:
    """Connections to one etcd.  Used on the loop; `close` it at the end."""

    def __init__(self, access: EtcdAccess, connect: Callable[[str, EtcdAccess], Endpoint] = Endpoint) -> None:
        """`connect` makes the endpoint of a URL."""
        if not access.endpoints:
            raise ConfigError("an etcd has an endpoint")
        self._access = access
        self._endpoints = [connect(url, access) for url in access.endpoints]
        self._used = secrets.randbelow(len(self._endpoints)) if access.first is None else access.first
        self._token = ""
        self.cluster = 0
        """The id of the etcd that answered last; 0 before that."""
        self._authenticating = trio.Lock()
        self._closed = False
        self._has_answered = True
        """The endpoint in use has answered, or is the first."""
        self._calls = CallsUnderWay()
        self._term = 0
        """The highest term of a leader that an answer had; 0 before that."""

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint in use."""
        return self._endpoints[self._used]

    def close(self) -> None:
        """End all calls and streams, and those to come, with EngineUnreachable."""
        self._closed = True
        self._calls.end_all()
        for endpoint in self._endpoints:
            endpoint.channel.close()

    def check_open(self) -> None:
        """Raise EngineUnreachable if the link was closed."""
        if self._closed:
            raise EngineUnreachable("the coordinator was closed")

    def leave(self, endpoint: Endpoint, status: Status) -> None:
        """Use another endpoint, if this one is still in use; its streams move too if it is silent."""
        if endpoint is self.endpoint and len(self._endpoints) > 1 and not self._closed:
            self._use(self._next())
        if status.is_silence:
            for stream in list(endpoint.streams):
                stream.cancel()

    def _next(self) -> int:
        """Return the number of the next endpoint; of the next that was heard just now, if there is one."""
        others = [(self._used + step) % len(self._endpoints) for step in range(1, len(self._endpoints))]
        since = trio.current_time() - ETCD_LOOK_S
        return next((number for number in others if self._endpoints[number].heard_at >= since), others[0])

    def _use(self, number: int) -> None:
        """Use another endpoint."""
        left, self._used = self.endpoint, number
        if self._has_answered:  # said once, and not each time round while none answers
            _log.info("another endpoint of etcd is used", endpoint=self.endpoint.address, left=left.address)
        self._has_answered = False

    # --- calls -------------------------------------------------------------------------------------------

    async def ask(self, method: Method, request: e.Message) -> e.Message | Status:
        """Return the answer to a request that may be repeated, or the status that refused it."""
        answer, _ = await self.ask_each(method, lambda _: request)
        return answer

    async def ask_all(self, method: Method, request: e.Message, timeout_s: float) -> list[e.Message | Status]:
        """Ask each endpoint once, one after the other, and return their answers."""
        return [await self._ask_once(endpoint, method, request, timeout_s) for endpoint in self._endpoints]

    async def ask_each(
        self, method: Method, make: Callable[[bool], e.Message], *, is_repeat: bool = False
    ) -> tuple[e.Message | Status, bool]:
        """Return the answer, or the status that refused the last try, and True if an earlier one may have been done.

        `make` returns the request of a try, from True if an earlier one may have been done, or may yet be.
        EngineUnreachable when no endpoint answered in time; then any of the tries may have been done, or may yet be.
        """
        with self._calls.call():
            return await self._ask_each(method, make, is_repeat)

    async def _ask_each(
        self, method: Method, make: Callable[[bool], e.Message], is_repeat: bool
    ) -> tuple[e.Message | Status, bool]:
        until = trio.current_time() + ETCD_CALL_S
        refused_until = trio.current_time() + ETCD_REFUSED_S
        tokens = 0
        for try_s in _tries_s():
            endpoint = self.endpoint
            answer = await self._ask_once(endpoint, method, make(is_repeat), min(try_s, until - trio.current_time()))
            if isinstance(answer, Status) and answer.is_token_refused and self._access.user and tokens < _TOKENS_MAX:
                tokens += 1
                continue
            if not isinstance(answer, Status):
                self._check_cluster(endpoint, answer)
                return answer, is_repeat
            if not answer.is_open:
                return answer, is_repeat
            is_repeat = True
            if answer is OVERTAKEN:
                continue
            refused_until = refused_until if answer.is_refused else math.inf
            self.leave(endpoint, answer)
            if not answer.is_silence:
                await trio.sleep(ETCD_PAUSE_S)
            if trio.current_time() >= min(until, refused_until):
                raise error_of(answer, endpoint.address)
        raise AssertionError("tries do not end")

    def _check_cluster(self, endpoint: Endpoint, answer: e.Message) -> None:
        """Note which etcd has answered.  EngineUnreachable for another one than is meant."""
        self._has_answered = True
        if not answer.header.cluster_id:  # alarms are answered without a header
            return
        self.cluster = answer.header.cluster_id
        if self._access.cluster and self.cluster != self._access.cluster:
            raise EngineUnreachable(
                f"etcd at {endpoint.address} is another cluster, {self.cluster:x}, not {self._access.cluster:x}: it "
                "was made anew or put back from a backup; bring the right one back",
                subject=endpoint.address,
            )
        self._note_term(endpoint, answer.header.raft_term)

    def _note_term(self, endpoint: Endpoint, term: int) -> None:
        """Note the term of the leader that an endpoint knows; give up what was sent before that one was elected."""
        before, self._term = self._term, max(self._term, term)
        if 0 < before < term and self._calls.give_up() and endpoint is not self.endpoint:
            self._use(self._endpoints.index(endpoint))

    async def look_around(self, sign: e.Message) -> None:
        """Look for another leader while an answer is late, until cancelled; `sign`: see `keep_heard`."""
        async with trio.open_nursery() as nursery:
            for endpoint in self._endpoints:
                nursery.start_soon(self._look_at, endpoint, sign)

    async def _look_at(self, endpoint: Endpoint, sign: e.Message) -> None:
        while True:
            await trio.sleep(ETCD_LATE_S / 2)
            if self._calls.are_late(ETCD_LATE_S):
                with suppress(EngineUnreachable):
                    answer = await self._ask_once(endpoint, RANGE, sign, ETCD_LATE_S)
                    if not isinstance(answer, Status):
                        self._check_cluster(endpoint, answer)

    async def _ask_once(
        self, endpoint: Endpoint, method: Method, request: e.Message, timeout_s: float
    ) -> e.Message | Status:
        """Return the answer of one endpoint, or the status of the call; always a checkpoint before that."""
        refused = await self._authenticate(endpoint, timeout_s) if self._access.user else None
        if refused is not None:
            return refused
        token = self._token
        answer = await self._call(endpoint, method, request, timeout_s)
        if isinstance(answer, Status) and answer.is_token_refused and self._token == token:
            self._token = ""
        return answer

    async def _authenticate(self, endpoint: Endpoint, timeout_s: float) -> Status | None:
        """Make sure of a token, which all calls share, and one of them asks for: etcd spends 0.1 s of CPU on each."""
        until = trio.current_time() + timeout_s
        with trio.move_on_at(until) as waiting:
            async with self._authenticating:
                waiting.deadline = math.inf
                if self._token:
                    return None
                request = e.AuthenticateRequest(name=self._access.user, password=self._access.password)
                answer = await self._call(endpoint, _AUTHENTICATE, request, until - trio.current_time())
                if isinstance(answer, Status):
                    return answer
                self._token = answer.token
                return None
        return _NO_TOKEN

    async def _call(
        self, endpoint: Endpoint, method: Method, request: e.Message, timeout_s: float
    ) -> e.Message | Status:
        await trio.lowlevel.checkpoint()
        self.check_open()
        sent = self._calls.begin(takes_long=method is DEFRAGMENT)
        token = trio.lowlevel.current_trio_token()
        future = endpoint.sender(method).future(request, timeout=max(0.0, timeout_s), metadata=self.metadata())
        future.add_done_callback(lambda _: _wake(token, sent.done))
        try:
            await (sent.done.wait() if method is RANGE else _waited(sent.done))
        finally:
            self._calls.end(sent)
            future.cancel()
        self.check_open()
        if sent.is_given_up:
            return OVERTAKEN
        try:
            answer = future.result(timeout=0)
        except grpc.RpcError as error:
            return status_of(error)
        endpoint.heard_at = trio.current_time()
        return answer

    # --- streams -----------------------------------------------------------------------------------------

    def open_stream(self, endpoint: Endpoint, method: Method, request: e.Message) -> Any:
        """Begin a call with a stream of answers, an iterator that blocks; `end_stream` it."""
        sends = endpoint.channel.unary_stream(
            method.path, request_serializer=_serialized, response_deserializer=method.answer.FromString
        )
        stream = sends(request, metadata=self.metadata())
        endpoint.streams[stream] = None
        return stream

    async def read_stream(self, stream: Any, take: Callable[[Any], Awaitable[bool]]) -> Status:
        """Give the answers of a stream to `take`, one after the other, until it returns True, or the stream ends.

        They are read in a thread, which ends when this is cancelled.
        """
        return await read_answers(stream, take)

    async def keep_heard(self, endpoint: Endpoint, sign: e.Message) -> None:
        """Leave an endpoint once it gives no sign of life, and return; beside each of its streams.

        `sign` is a read that it answers by itself, without others.  Streams of an endpoint share what they learn.
        """
        while True:
            wait_s = max(endpoint.heard_at, endpoint.asked_at) + ETCD_LOOK_S - trio.current_time()
            if wait_s > 0:
                await trio.sleep(wait_s)
                continue
            endpoint.asked_at = trio.current_time()
            answer = await self._ask_once(endpoint, RANGE, sign, ETCD_TRY_S)
            if isinstance(answer, Status) and answer.is_silence:
                self.leave(endpoint, answer)
                return

    def end_stream(self, endpoint: Endpoint, stream: Any) -> None:
        """End a stream; its iterator ends in the thread that reads it."""
        endpoint.streams.pop(stream, None)
        stream.cancel()

    def drawn_number(self) -> int:
        """Return a number of 62 bits that nobody else has drawn, from 1 on."""
        return secrets.randbits(62) + 1

    def forget_token(self) -> None:
        """Let the next call ask for another token."""
        self._token = ""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what each request carries."""
        return (_NEEDS_LEADER, ("token", self._token)) if self._token else (_NEEDS_LEADER,)


def _serialized(message: Any) -> bytes:
    """Return the bytes of a message, in the step in which it is sent."""
    packed: bytes = message.SerializeToString()
    return packed


def _tries_s() -> Iterator[float]:
    """Yield how long each try may take."""
    for turn in itertools.count(1):
        yield ETCD_TRY_S * math.pow(2, min(max(0, turn - ETCD_QUICK_TRIES), 8))


async def _waited(done: trio.Event) -> None:
    """Wait for the end of a call; when that is cancelled, a little longer."""
    try:
        await done.wait()
    except trio.Cancelled:
        with trio.move_on_after(ETCD_CANCEL_S, shield=True):
            await done.wait()
        raise


def _wake(token: trio.lowlevel.TrioToken, done: trio.Event) -> None:
    """Wake the loop from a thread of gRPC's, unless it has ended."""
    with suppress(trio.RunFinishedError):
        token.run_sync_soon(done.set)
