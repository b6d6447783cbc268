"""A small file system in memory, mounted by `fuse.kernel.attach` in its own process: a mount without a store.

`python -m tests.e2e.tiny_fs DIR [OPTION...]` says `ready`, then serves until it is unmounted or gets a signal.  Files:
`hello` holds `hello\n`; reading `slow` waits until that signal; reading `broken` lets an error
escape; reading `forever` never returns.  The option `hurry` waits 0.2 s for such at the end, not 20 s.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import stat
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyfuse3
import trio

import fuse.kernel.attach
from cli.terminal.logs import log_to_stderr
from fuse.kernel.attach import MountOptions, mounted
from fuse.kernel.mount_point import real_path

CONTENT: Final = b"hello\n"
FILES: Final = ("hello", "slow", "broken", "forever")


def say(word: str) -> None:
    """Print one word for the test, at once."""
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


class TinyFs(pyfuse3.Operations):
    """A root with a few files of six bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.go = trio.Event()

    async def getattr(self, inode: pyfuse3.InodeT, ctx: Any = None) -> pyfuse3.EntryAttributes:
        found = pyfuse3.EntryAttributes()
        found.st_ino = inode
        is_root = inode == pyfuse3.ROOT_INODE
        found.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o755 if is_root else stat.S_IFREG | 0o644)
        found.st_nlink = 1
        found.st_size = 0 if is_root else len(CONTENT)
        return found

    async def lookup(self, parent_inode: pyfuse3.InodeT, name: pyfuse3.FileNameT, ctx: Any) -> pyfuse3.EntryAttributes:
        text = os.fsdecode(name)
        if text not in FILES:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(pyfuse3.InodeT(2 + FILES.index(text)))

    async def opendir(self, inode: pyfuse3.InodeT, ctx: Any) -> pyfuse3.FileHandleT:
        return pyfuse3.FileHandleT(inode)

    async def readdir(self, fh: pyfuse3.FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        for place, name in enumerate(FILES[start_id:], start_id):
            entry = await self.getattr(pyfuse3.InodeT(2 + place))
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name.encode()), entry, place + 1):
                return

    async def open(self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: Any) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), direct_io=True)

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        name = FILES[fh - 2]
        if name == "broken":
            raise ValueError("an error that no handler may raise")
        if name == "slow":
            say("reading")
            await self.go.wait()
        if name == "forever":
            say("reading")
            await trio.sleep_forever()
        return CONTENT[off : off + size]

    async def flush(self, fh: pyfuse3.FileHandleT) -> None:
        return None

    async def release(self, fh: pyfuse3.FileHandleT) -> None:
        return None

    async def statfs(self, ctx: Any) -> pyfuse3.StatvfsData:
        return pyfuse3.StatvfsData()


async def serve(options: MountOptions) -> None:
    """Serve until unmounted, SIGTERM or SIGINT."""
    tiny = TinyFs()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def stop() -> None:
                async for _ in signals:
                    nursery.cancel_scope.cancel()
                    tiny.go.set()
                    return

            nursery.start_soon(stop)
            async with mounted(tiny, options):
                say("ready")
                await trio.sleep(math.inf)
            nursery.cancel_scope.cancel()
    say("ended")


def main() -> None:
    place, *names = sys.argv[1:]
    log_to_stderr("info")
    if "hurry" in names:
        names.remove("hurry")
        fuse.kernel.attach.DRAIN_WAIT_S = 0.2  # type: ignore[misc]
    options = MountOptions(real_path(Path(place)), staging=Path("/nowhere"))
    flags: dict[str, Any] = dict.fromkeys(names, True)
    trio.run(serve, replace(options, **flags))


if __name__ == "__main__":
    main()
