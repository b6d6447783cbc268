"""Heads beside the process that serves a lake, for a machine whose clients keep more than one processor busy.

    clients --> one socket, one port --> head 1 .. head N --> names, of this process or of another machine
                                                        \\--> members

This process binds the addresses of the native protocol and lends its heads the sockets: the head that is free first
takes the next client.  It serves the names to them at a socket of its own, `SOCKET.names` (mode 0600), and keeps a head
for what runs in it: S3, and the admin port.

Rules kept here:
- A client that connects while a head is started again waits for another one, as the sockets are this process's.
- Clients are refused before heads are stopped, and names serve until the last head has ended.
- Heads learn about members' processes, and about each other's clients, from this process, whenever something changes.
  One that is stopped is sent nothing until it reads again, and holds up no other one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import trio

from engine.lake.children import Child, Children, News, open_children
from lakefs.errors import StoreUnusable
from lakefs.transport.streams import SocketListener, TrioNetwork

TELL_EVERY_S: Final = 2.0

HeadCommand = Callable[[int, Sequence[int], str], Sequence[str]]
"""Returns the command of a head's process: of its number from 1 on, the sockets that it inherits, and the address of
the names for it, empty where it reaches those of another machine."""


@dataclass(frozen=True)
class HeadPlan:
    """One head's process (`engine.lake.children.ChildPlan`)."""

    number: int
    command: Sequence[str]
    descriptors: Sequence[int]
    title: str = "a head"

    def about(self) -> dict[str, str]:
        """See `ChildPlan`."""
        return {"head": str(self.number)}

    def unwanted_because(self) -> str:
        """See `ChildPlan`: a head has nothing that could go."""
        return ""


class HeadProcesses:
    """The heads of this machine, and the sockets at which they accept clients."""

    def __init__(
        self, count: int, command: HeadCommand, about_machine: Callable[[], dict[str, Any]], own: Callable[[], News]
    ) -> None:
        """`own`: the figures of the head of this process (`engine.head.head_figures`)."""
        self._count = count
        self._command = command
        self._about_machine = about_machine
        self._own = own
        self._listeners: list[SocketListener] = []
        self._heads: Children[HeadPlan] | None = None

    @property
    def addresses(self) -> list[str]:
        """The addresses at which clients connect."""
        return [listener.address for listener in self._listeners]

    def connections(self) -> int:
        """Return the number of clients of all of them."""
        return sum(head.news["clients"]["connections"] for head in self._serving() if head.news)

    async def run(
        self,
        addresses: Sequence[str],
        network: TrioNetwork,
        names: str,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Bind, start the heads and keep them running until cancelled; started when each serves, or could not.

        StoreUnusable when none could be started; errors of binding.
        """
        try:
            for address in addresses:
                self._listeners.append(await network.listen(address))
            sockets = [listener.descriptor for listener in self._listeners]
            plans = [
                HeadPlan(number, self._command(number, sockets, names), sockets) for number in range(1, self._count + 1)
            ]
            async with open_children(plans, self._tell) as self._heads:
                await self._heads.wait_settled()
                if not any(head.is_serving for head in self._heads.all):
                    raise StoreUnusable("no head of the lake could be started: the log says why")
                task_status.started()
                await self._tell_changes(self._heads)
        finally:
            await self._close()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new clients, and stop the heads, which finish what is in flight."""
        await self._close()
        if self._heads is not None:
            await self._heads.stop()

    async def _close(self) -> None:
        with trio.CancelScope(shield=True):
            while self._listeners:
                await self._listeners.pop().aclose()

    def _serving(self) -> list[Child[HeadPlan]]:
        return [] if self._heads is None else [head for head in self._heads.all if head.is_serving]

    def _about(self) -> dict[str, Any]:
        """Return what a head's status says of this machine, with the figures of all heads by their process ids."""
        heads = [{"pid": os.getpid(), **self._own()}]
        heads += [{"pid": head.process.pid, **head.news} for head in self._serving() if head.process and head.news]
        return {**self._about_machine(), "heads": heads}

    async def _tell(self, head: Child[HeadPlan]) -> None:
        await head.tell(self._about())

    async def _tell_changes(self, heads: Children[HeadPlan]) -> None:
        told: dict[int, dict[str, Any]] = {}
        async with trio.open_nursery() as nursery:
            while True:
                about = self._about()
                for head in heads.all:
                    if told.get(head.plan.number) != about and not head.is_being_told:
                        told[head.plan.number] = about
                        nursery.start_soon(head.tell, about)
                await trio.sleep(TELL_EVERY_S)


def names_socket(socket: Path) -> str:
    """Return the address at which a lake's names serve the heads of their machine."""
    return f"unix:{socket.with_name(f'{socket.name}.names')}"
