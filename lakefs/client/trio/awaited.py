"""An `EngineClient` whose engine may be away, also at the start: for servers that must keep running without it.

A decorator around `ReconnectingEngine`.

Rules kept here:
- The engine is sent a Ping once a second; while it cannot be reached, connecting is tried all the time.
- Calls during which the engine is lost wait for it as long as `ReconnectingEngine` does.  After that time calls fail
  at once, so that they do not pile up, until the engine is back.
- Errors of calls do not name the engine or its address: a server passes them on to strangers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import structlog
import trio

from lakefs.client.trio.reconnecting import ReconnectingEngine, connect_reconnecting
from lakefs.client.trio.watch_events import WatchEvents
from lakefs.errors import EngineUnreachable, LakeError, OperationalError
from lakefs.ids import Buffer
from lakefs.limits import ENGINE_SILENCE_S
from lakefs.ports import Network
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Ping, Request
from lakefs.wire.offers import Offers

_ASK_EVERY_S: Final = 1.0
_TRY_EVERY_S: Final = 0.25
_ANSWER_S: Final = 5.0
"""An engine that takes longer to answer a Ping is reported as not ready; calls are still sent to it."""
_log: Final = structlog.get_logger(__name__)


class AwaitedEngine:
    """An engine client.  Its owner runs `run` in a task, which keeps it connected."""

    def __init__(
        self, address: str, token: str = "", network: Network | None = None, silence_s: float = ENGINE_SILENCE_S
    ) -> None:
        self.address = address
        self.not_ready: str | None = "the engine was not asked yet"
        """Reason why requests cannot be served, as text for people; None if they can."""
        self.offers = Offers()
        """See `EngineClient.offers`; nothing is offered before the first connection."""
        self._token = token
        self._network = network
        self._silence_s = silence_s
        self._engine: ReconnectingEngine | None = None
        self._is_away = True

    @property
    def epoch(self) -> int:
        """Count of connections so far."""
        return self._engine.epoch if self._engine is not None else 0

    @property
    def carries_descriptors(self) -> bool:
        """See `EngineClient.carries_descriptors`; judged by the address, also before the first connection."""
        return self.address.startswith("unix:")

    def is_connected(self) -> bool:
        """See `EngineClient.is_connected`; a system call."""
        return self._engine is not None and self._engine.is_connected()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep it connected until cancelled; reports itself started when the first attempt has succeeded or failed.

        Errors of a connect that waiting does not mend are raised: PermissionDenied, InvalidArgument.
        """
        is_started = False
        while True:
            try:
                connecting = connect_reconnecting(
                    self.address,
                    token=self._token,
                    network=self._network,
                    silence_s=self._silence_s,
                    offers=self.offers,
                )
                async with connecting as engine:
                    self._engine = engine
                    self._reached()
                    if not is_started:
                        task_status.started()
                    await self._keep_asking(engine)
            except OperationalError as error:
                self._missed(error)
            if not is_started:
                is_started = True
                task_status.started()
            await trio.sleep(_TRY_EVERY_S)

    async def call(
        self,
        request: Request,
        body: Sequence[Buffer] = (),
        descriptors: Sequence[int] = (),
        *,
        into: Sequence[memoryview] = (),
    ) -> Reply:
        """See `EngineClient.call`.  EngineUnreachable at once while the engine is away."""
        if self._engine is None or self._is_away:
            raise _away()
        try:
            return await self._engine.call(request, body, descriptors, into=into)
        except EngineUnreachable as error:
            raise _away() from error

    def tell(self, request: Request) -> bool:
        """See `EngineClient.tell`."""
        return self._engine is not None and not self._is_away and self._engine.tell(request)

    @asynccontextmanager
    async def watch(self, bucket: str, *, others_only: bool = False) -> AsyncIterator[WatchEvents]:
        """See `EngineClient.watch`."""
        if self._engine is None or self._is_away:
            raise _away()
        async with self._engine.watch(bucket, others_only=others_only) as events:
            yield events

    async def _keep_asking(self, engine: ReconnectingEngine) -> None:
        while True:
            try:
                with trio.move_on_after(_ANSWER_S + _ASK_EVERY_S) as waiting:
                    await engine.call(Ping())
            except LakeError as error:
                self._missed(error)
            else:
                if waiting.cancelled_caught:
                    self._missed(EngineUnreachable("the engine does not answer"), is_away=self._is_away)
                else:
                    self._reached()
            await trio.sleep(_TRY_EVERY_S if self._is_away else _ASK_EVERY_S)

    def _reached(self) -> None:
        if self.not_ready is not None:
            _log.info("engine_reached", engine=self.address)
        self.not_ready = None
        self._is_away = False

    def _missed(self, error: LakeError, *, is_away: bool = True) -> None:
        if self.not_ready != error.message:
            _log.warning("engine_away", engine=self.address, reason=error.message)
        self.not_ready = error.message
        self._is_away = is_away


def _away() -> EngineUnreachable:
    return EngineUnreachable("the store cannot be reached now; try again")
