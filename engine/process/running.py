"""A serving process: its listeners, its other faces, and an orderly end; the same for one engine and for a lake.

`serve_until_signal` listens, starts the faces that its caller passes (S3, admin port, notices to the service manager),
and serves until SIGTERM or SIGINT.  Then it stops accepting, and waits at most 20 s for requests in flight.  A second
signal ends the wait.

The process imports none of the faces that are passed to it.
"""

from __future__ import annotations

import resource
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import structlog
import trio

from engine.server.listener import Server
from engine.tiers.arena import tier_bytes
from lakefs.config.settings import Config
from lakefs.host.memory_limits import memory_bytes
from lakefs.limits import CONNECTIONS_MAX
from lakefs.ports import Disk, Offload
from lakefs.wire.engine_port import EngineService

DRAIN_TIMEOUT_S: Final = 20.0
OWN_DESCRIPTORS: Final = 128
"""Descriptors for journal, index, open segments, listeners and spares; read files and connections share the rest."""
DESCRIPTORS_PER_SLAB: Final = 2
"""Descriptors of a slab: one to send to clients, and one that its mapping keeps."""
_CONNECTIONS_MIN: Final = 8
_log: Final = structlog.get_logger()


@dataclass(kw_only=True)
class Running(ABC):
    """The parts of a serving process that its other faces may use.  Subclasses say whether it serves."""

    config: Config
    service: EngineService
    server: Server
    offload: Offload
    disk: Disk
    """Holds files of secrets."""
    title: str
    """A line to print: where content lies, and its id."""
    addresses: list[str] = field(default_factory=list)
    drains: list[Callable[[float], Awaitable[None]]] = field(default_factory=list)
    """Called when the stop begins: each finishes a face's work, within the given seconds."""
    collectors: list[Any] = field(default_factory=list)
    """Metrics of other faces for the admin port, which starts after them."""
    stopping: trio.Event = field(default_factory=trio.Event)
    """Set when the stop begins: requests in flight are finished, and no new ones are begun."""

    @property
    @abstractmethod
    def is_untouched(self) -> bool:
        """True if nothing was ever named here."""

    def native_addresses(self) -> list[str]:
        """Return the addresses of the native protocol, as they are configured."""
        native = self.config.native
        return [f"unix:{self.config.socket}"] + ([f"tcp://{native}"] if native else [])

    async def listen(self, nursery: trio.Nursery) -> None:
        """Begin to serve the native protocol, at `addresses`.  Raises the errors of binding."""
        for address in self.native_addresses():
            self.addresses.append(await nursery.start(self.server.listen_and_serve, address))

    @abstractmethod
    def read_only_because(self) -> str:
        """Return why no writes are taken; empty while they are."""

    def not_ready(self) -> str | None:
        """Return why the process does not serve; None when it does."""
        if self.stopping.is_set():
            return "stopping"
        return self.read_only_because() or None


Face = Callable[..., Awaitable[None]]
"""`async def face(running: Running, *, task_status)`: calls `started` with a line to print, or None."""


async def serve_until_signal(
    running: Running, nursery: trio.Nursery, signals: Any, printer: Callable[[str], None], faces: Sequence[Face]
) -> None:
    """Listen, start the faces, and serve until a signal; returns when what was in flight is finished.

    The tasks that serve run on in the nursery; the caller cancels it.  Raises the errors of binding the addresses.
    """
    await _start_faces(running, nursery, printer, faces)
    await _wait_for_signal(signals)
    running.stopping.set()
    printer("stopping: finishing what is in flight")
    with trio.CancelScope() as drain:
        nursery.start_soon(_cancel_on_signal, signals, drain)
        async with trio.open_nursery() as drains:
            for finish in (running.server.drain, *running.drains):
                drains.start_soon(finish, DRAIN_TIMEOUT_S)


def connections_limit(others: int) -> int:
    """Return the most native connections: a third of the descriptors that the process's own and `others` leave.

    The process's limit of descriptors is raised to the most that it may have.
    """
    return max(_CONNECTIONS_MIN, min(CONNECTIONS_MAX, (_raise_descriptor_limit() - others - OWN_DESCRIPTORS) // 3))


def tier_size_of(config: Config) -> int:
    """Return the bytes of the DRAM tier, in whole slabs; 0: none.  Logs when less is taken than was asked for."""
    size, warning = tier_bytes(config.dram_tier_bytes, memory_bytes())
    if warning:
        _log.warning(warning)
    return size


async def _start_faces(
    running: Running, nursery: trio.Nursery, printer: Callable[[str], None], faces: Sequence[Face]
) -> None:
    await running.listen(nursery)
    printer(running.title)
    for address in running.addresses:
        printer(f"listen  {address}")
    for face in faces:
        line = await nursery.start(face, running)
        if line:
            printer(str(line))
    printer("ready")


async def _wait_for_signal(signals: Any) -> None:
    async for _ in signals:
        return


async def _cancel_on_signal(signals: Any, drain: trio.CancelScope) -> None:
    await _wait_for_signal(signals)
    drain.cancel()


def _raise_descriptor_limit() -> int:
    """Raise the descriptor limit to the hard limit; returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard if hard != resource.RLIM_INFINITY else sys.maxsize
