"""Waits until a mount has left its place: it is not in the table of mounts there any more.

The kernel reports changes of the table to who polls the file: always readable for poll(2), so its edges count (as in
libmount's monitor).  An epoll instance of its own turns those into a descriptor that the loop can wait for.
"""

from __future__ import annotations

import select
from types import TracebackType
from typing import Final, Self

import trio

from fuse.kernel.mount_point import MOUNT_TABLE, MountEntry, all_mounts
from lakefs.errors import LocalFileError

LOOK_PAUSE_S: Final = 0.1
"""Least time between two looks: the kernel takes a ms for a long table, and on some machines it changes always."""


class PlaceWatch:
    """The table of mounts, watched for one mount.

    Has two descriptors from its construction to the end of the block; LocalFileError if there are none.
    """

    def __init__(self, entry: MountEntry) -> None:
        self._entry = entry
        try:
            self._table = MOUNT_TABLE.open("rb", buffering=0)
            self._changes = select.epoll()
        except OSError as error:
            raise LocalFileError(f"{MOUNT_TABLE}: {error.strerror}", subject=str(MOUNT_TABLE)) from error
        self._changes.register(self._table, select.EPOLLIN | select.EPOLLET)

    async def wait_left(self) -> None:
        """Return when the mount is at its place no more, neither uppermost nor below another."""
        while self._is_at_place():
            await trio.lowlevel.wait_readable(self._changes.fileno())
            self._changes.poll(0)  # before the look: a change after it is an edge of its own
            await trio.sleep(LOOK_PAUSE_S)

    def _is_at_place(self) -> bool:
        entry = self._entry
        try:
            mounts = all_mounts(entry.device)
        except LocalFileError:
            return True  # no descriptor is left just now: the next change is another occasion
        return any(each.mount_point == entry.mount_point for each in mounts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changes.close()
        self._table.close()
