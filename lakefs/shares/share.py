"""One thing that the engine shares with a client for a request: its stamps, its shared index, its keyed index.

Rules kept here:
- It is used on the connection that it was requested on, and on no other.
- It is requested once on each connection, and again after the engine has replaced it.
- It is requested only where it is offered (`lakefs.wire.offers`).  A client that does not get it sends requests: that
  is no error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from lakefs.errors import CorruptionError, EngineUnreachable, LakeError, UnsupportedVersion
from lakefs.host.descriptors import close_all
from lakefs.lake.lake_steps import LakeSteps
from lakefs.steps.steps import Steps, send
from lakefs.wire.engine_port import Reply
from lakefs.wire.messages import Request

T = TypeVar("T")
R = TypeVar("R")
ATTEMPTS: Final = 2
NEVER: Final = -1
"""The epoch of no connection."""


class Connected(Protocol):
    """The part of a client that uses what its engine shares."""

    steps: LakeSteps

    @property
    def epoch(self) -> int:
        """Count of connections so far."""

    def tell(self, request: Request) -> bool:
        """Send a request whose answer does not matter, if that needs no wait; return True if it was sent."""

    def is_held(self, epoch: int) -> bool:
        """Return True if the connection of that epoch is still open, so that the engine keeps what it gave on it."""


class Share(Generic[T]):
    """One shared thing, as it is used on the present connection."""

    def __init__(self, client: Connected) -> None:
        self._client = client
        self.forget()

    def forget(self) -> None:
        """Drop it, as when the client is closed, or in a child that was forked: it is the parent's."""
        self._found: T | None = None
        self._epoch = NEVER
        self.refusal: LakeError | None = None
        """The error with which the engine answered the last request for it."""

    def at_hand(self) -> T | None:
        """Return it; None when the engine of this connection has not shared it."""
        return self._found if self._epoch == self._client.epoch else None

    def use(self, found: T | None, epoch: int) -> None:
        """Use what the engine of connection `epoch` shares, if anything, while that connection is current."""
        self._found = found
        self._epoch = epoch

    @property
    def is_due(self) -> bool:
        """True if it is to be requested: once on each connection, and after the engine has replaced it."""
        if not self._is_offered:
            return False
        return self._epoch != self._client.epoch or (self._found is not None and not self._is_current(self._found))

    def renewal(self) -> Steps[None]:
        """Request it and use it; to be run by itself, when `is_due`.

        EngineUnreachable: the caller would only wait for the engine once more.
        """
        epoch = self._client.epoch
        self.refusal, found = None, None
        if not self._is_offered:
            self.refusal = UnsupportedVersion("the engine does not offer this on this connection")
            self.use(None, epoch)
            return
        try:
            found = yield from self._opened(epoch)
        except EngineUnreachable:
            raise
        except LakeError as error:
            self.refusal = error
        if self._client.epoch == epoch:  # else it may be a lost engine's: the next use asks
            self.use(found, epoch)

    @property
    def _is_offered(self) -> bool:
        """True if the engine of this connection says that it can be had."""
        raise NotImplementedError

    def _opened(self, epoch: int) -> Steps[T | None]:
        """Return it as the engine of connection `epoch` shares it; None if this client has no use of it.  LakeError."""
        raise NotImplementedError

    def _is_current(self, found: T) -> bool:
        """Return True unless the engine has another one by now."""
        return True


def opened(request: Request, reader: Callable[[int], R]) -> Steps[R]:
    """Return what the engine shares for a request, as `reader` maps its descriptor.  LakeError."""
    return (yield from opened_of(request, lambda reply: reader(reply.descriptors[0])))


def opened_of(request: Request, reader: Callable[[Reply], R]) -> Steps[R]:
    """Return what the engine shares for a request, as `reader` maps the descriptors of its reply.  LakeError."""
    attempt = 0
    while True:
        attempt += 1
        reply = yield from send(request)
        try:
            return reader(reply)
        except CorruptionError:  # a later version; or it was replaced while its descriptor was sent
            if attempt >= ATTEMPTS:
                raise
        finally:
            close_all(reply.descriptors)
