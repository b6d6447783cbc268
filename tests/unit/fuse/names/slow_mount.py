"""A mount without an engine: its answers wait, once read, while a test holds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from fuse.state.attributes import Owner
from fuse.state.inodes import Inode, InodeTable
from fuse.state.kept import Absences, Answer
from fuse.state.mount import Mount
from fuse.state.stat_fields import FOLDER, OBJECT, Attributes
from lakefs.errors import KeyNotFound
from lakefs.names import Name
from lakefs.wire.messages import ListEntry, ObjectStat

OPTIONS = SimpleNamespace(entry_timeout_s=60.0, attribute_timeout_s=60.0, sync=False)


class SlowMount(Mount):
    """A mount whose engine has `records`, and whose answers wait, once read, while `holds` is set."""

    def __init__(self) -> None:
        self.table = InodeTable(Attributes(FOLDER), "bkt")
        self.owner = Owner(0, 0)
        self.options = cast(Any, OPTIONS)
        self.watched = {""}
        self.absences = Absences(self.stands)
        self.records: dict[str, ObjectStat] = {}
        self.holds = trio.Event()
        self.holds.set()
        self.forgotten: list[Inode] = []
        self.forget_attributes = self.forgotten.append

    def engine_boot(self) -> bytes:
        return b"boot"

    def stands(self, kept: tuple[bytes, int] | None) -> bool:
        return False

    async def follow(self, found: ObjectStat | ListEntry) -> None:
        return None

    async def look_up(self, names: Sequence[Name]) -> list[Answer]:
        found = [Answer(self.records.get(name.key) or KeyNotFound("none")) for name in names]
        await self.holds.wait()
        await trio.lowlevel.checkpoint()
        return found

    def put(self, key: str, node: int, blob: bytes = b"1", *, mode: int = 0o644, note: bytes = b"") -> None:
        kind = FOLDER if key.endswith("/") else OBJECT
        xattrs = {"user.note": note} if note else {}
        self.records[key] = ObjectStat("bkt", key, kind, node, len(blob), "", 1, blob=blob, mode=mode, xattrs=xattrs)


async def held(
    mount: SlowMount, look: Callable[[], Awaitable[object]], change: Callable[[], Awaitable[object]]
) -> None:
    """Run `look`, and hold back its answer, which is read before `change`, until that has ended."""
    mount.holds = trio.Event()
    async with trio.open_nursery() as nursery:

        async def looking() -> None:
            await look()

        nursery.start_soon(looking)
        await trio.testing.wait_all_tasks_blocked()
        holds, mount.holds = mount.holds, trio.Event()
        mount.holds.set()
        await trio.sleep(1)
        await change()
        await trio.sleep(1)
        holds.set()
