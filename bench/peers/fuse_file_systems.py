"""Two small pyfuse3 file systems to compare the mount with, with the mount's own options.

    python -m bench.peers.fuse_file_systems constant MOUNT_POINT --size BYTES
    python -m bench.peers.fuse_file_systems passthrough MOUNT_POINT --source FOLDER

`constant` has one file, `data`, and answers every read from one buffer: the cost of FUSE and Python if storage costs
nothing.  `passthrough` does each operation on the same name below a folder, in the plainest way: their cost over a
local disk.  Both print `ready` once they are mounted, and unmount at SIGTERM.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Final

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FileNameT, FlagT, FUSEError, InodeT, ModeT

from bench.peers.passthrough import TIMEOUT_S, Passthrough, keep_for

READ_AHEAD_KIB: Final = 4096
MAX_TASKS: Final = 256
BUFFER: Final = bytes(range(256)) * 4096
CONSTANT_NAME: Final = b"data"
CONSTANT_INODE: Final = InodeT(2)


class Constant(pyfuse3.Operations):
    """One file of a given size; the bytes of any range are the beginning of one buffer."""

    def __init__(self, size: int, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__()
        self._size = size
        self._timeout_s = timeout_s

    def _attributes(self, inode: InodeT) -> EntryAttributes:
        if inode not in (pyfuse3.ROOT_INODE, CONSTANT_INODE):
            raise FUSEError(errno.ENOENT)
        folder = inode == pyfuse3.ROOT_INODE
        found = keep_for(self._timeout_s, EntryAttributes())
        found.st_ino = inode
        found.st_mode = ModeT(stat.S_IFDIR | 0o755 if folder else stat.S_IFREG | 0o644)
        found.st_nlink = 1
        found.st_size = 0 if folder else self._size
        return found

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        if name != CONSTANT_NAME:
            raise FUSEError(errno.ENOENT)
        return self._attributes(CONSTANT_INODE)

    async def getattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        return self._attributes(inode)

    async def open(self, inode: InodeT, flags: FlagT, ctx: pyfuse3.RequestContext) -> FileInfo:
        return FileInfo(fh=FileHandleT(inode), keep_cache=True)

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        wanted = max(0, min(size, self._size - off))
        # The kernel reads 1 MiB at most; the whole buffer is sent without a copy.
        return BUFFER if wanted == len(BUFFER) else BUFFER[:wanted]

    async def flush(self, fh: FileHandleT) -> None:
        return

    async def release(self, fh: FileHandleT) -> None:
        return

    async def opendir(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> FileHandleT:
        return FileHandleT(inode)

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        if start_id == 0:
            pyfuse3.readdir_reply(token, CONSTANT_NAME, self._attributes(CONSTANT_INODE), 1)


def set_read_ahead(mount_point: Path) -> None:
    """Raise the kernel's read-ahead of a mount to the mount's own default."""
    # A stat would ask the file system, which answers only while its loop runs.
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    numbers = [fields[2] for fields in map(str.split, lines) if fields[4] == str(mount_point.absolute())]
    Path(f"/sys/class/bdi/{numbers[-1]}/read_ahead_kb").write_text(f"{READ_AHEAD_KIB}\n")


def serve(operations: pyfuse3.Operations, mount_point: Path, name: str) -> None:
    """Mount, print `ready`, and serve until SIGTERM or an unmount from outside."""
    os.umask(0)
    pyfuse3.init(operations, str(mount_point), set(pyfuse3.default_options) | {f"fsname={name}"})
    try:
        trio.run(_serve, mount_point)
    finally:
        pyfuse3.close(unmount=True)


async def _serve(mount_point: Path) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_at_signal)
        nursery.start_soon(_get_ready, mount_point)
        await pyfuse3.main(max_tasks=MAX_TASKS)
        nursery.cancel_scope.cancel()


async def _get_ready(mount_point: Path) -> None:
    """Wait for the first answer, which ends the kernel's handshake; read-ahead set earlier would be reset to 128
    KiB."""
    await trio.to_thread.run_sync(os.stat, mount_point)
    set_read_ahead(mount_point)
    print("ready", flush=True)


async def _end_at_signal() -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            pyfuse3.terminate()


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.fuse_file_systems", description="A file system to compare with."
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    constant = kinds.add_parser("constant", help="one file, every read answered from one buffer")
    constant.add_argument("mount_point", type=Path)
    constant.add_argument("--size", type=int, required=True, metavar="BYTES")
    passthrough = kinds.add_parser("passthrough", help="every operation done below a folder")
    passthrough.add_argument("mount_point", type=Path)
    passthrough.add_argument("--source", type=Path, required=True, metavar="FOLDER")
    for kind in (constant, passthrough):
        kind.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help="names and attributes")
    options = parser.parse_args()
    operations: pyfuse3.Operations
    if options.kind == "constant":
        operations = Constant(options.size, options.timeout)
    else:
        operations = Passthrough(options.source, options.timeout)
    serve(operations, options.mount_point, options.kind)
    return 0


if __name__ == "__main__":
    sys.exit(main())
