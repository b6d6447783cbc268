"""The file system that passes through, with one planted bug: the model-based test has to find each of them.

python -m tests.mount.planted BUG MOUNT_POINT --source FOLDER
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import Final

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FileNameT, FlagT, FUSEError, InodeT, ModeT

from bench.peers.fuse_file_systems import serve
from bench.peers.passthrough import Passthrough


class TruncateFillsWithOld(Passthrough):
    """A file that is made longer does not read as zeros there."""

    def truncate(self, file: bytes | int, size: int) -> None:
        before = os.stat(file).st_size
        super().truncate(file, size)
        if size > before:
            descriptor = os.open(file, os.O_WRONLY) if isinstance(file, bytes) else os.dup(file)
            os.pwrite(descriptor, b"x", size - 1)
            os.close(descriptor)


class UnlinkEmptiesOpenFiles(Passthrough):
    """A file that is unlinked while open is empty."""

    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        path = self._child(parent_inode, name)
        if _is_plain(path):
            os.truncate(path, 0)
        await super().unlink(parent_inode, name, ctx)


class MillisecondTimes(Passthrough):
    """Times lose their nanoseconds."""

    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: pyfuse3.SetattrFields,
        fh: FileHandleT | None,
        ctx: pyfuse3.RequestContext,
    ) -> EntryAttributes:
        attr.st_mtime_ns = attr.st_mtime_ns // 1_000_000 * 1_000_000
        return await super().setattr(inode, attr, fields, fh, ctx)


class RenameRefusesEmptyFolders(Passthrough):
    """A folder cannot take the place of an empty one."""

    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: pyfuse3.RequestContext,
    ) -> None:
        if _is_folder(self._child(parent_inode_new, name_new)):
            raise FUSEError(errno.ENOTEMPTY)
        await super().rename(parent_inode_old, name_old, parent_inode_new, name_new, flags, ctx)


class LostLastByte(Passthrough):
    """A write that ends one byte after a page's edge loses that byte."""

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        if (off + len(buf)) % 4096 == 1 and len(buf) > 1:
            await super().write(fh, off, buf[:-1])
            await super().write(fh, off + len(buf) - 1, b"\0")
            return len(buf)
        return await super().write(fh, off, buf)


class LooseModes(Passthrough):
    """The mode of a file that is made is not kept."""

    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: pyfuse3.RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        return await super().create(parent_inode, name, ModeT(mode | 0o044), flags, ctx)


class FullFolderIsForbidden(Passthrough):
    """rmdir of a folder that is not empty fails with EACCES."""

    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: pyfuse3.RequestContext) -> None:
        try:
            await super().rmdir(parent_inode, name, ctx)
        except FUSEError as error:
            raise FUSEError(errno.EACCES if error.errno == errno.ENOTEMPTY else error.errno) from None


class AttributesStay(Passthrough):
    """removexattr does nothing."""

    async def removexattr(self, inode: InodeT, name: pyfuse3.XAttrNameT, ctx: pyfuse3.RequestContext) -> None:
        await self.getxattr(inode, name, ctx)


class StaleCache(Passthrough):
    """Another mount's changes of a file that was read here are never seen."""

    def __init__(self, source: Path) -> None:
        super().__init__(source)
        self._kept: dict[InodeT, EntryAttributes] = {}

    async def getattr(self, inode: InodeT, ctx: pyfuse3.RequestContext) -> EntryAttributes:
        if inode not in self._kept or self._nodes[inode].descriptors:
            self._kept[inode] = await super().getattr(inode, ctx)
        return self._kept[inode]


def _is_folder(path: bytes) -> bool:
    return os.path.isdir(path)


def _is_plain(path: bytes) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


BUGS: Final[dict[str, type[Passthrough]]] = {
    "truncate-fills-with-old": TruncateFillsWithOld,
    "unlink-empties-open-files": UnlinkEmptiesOpenFiles,
    "millisecond-times": MillisecondTimes,
    "rename-refuses-empty-folders": RenameRefusesEmptyFolders,
    "lost-last-byte": LostLastByte,
    "modes-of-new-files": LooseModes,
    "full-folder-is-forbidden": FullFolderIsForbidden,
    "attributes-stay": AttributesStay,
    "stale-cache": StaleCache,
}


def main() -> int:
    """Parse the command line, and serve."""
    parser = argparse.ArgumentParser(prog="python -m tests.mount.planted")
    parser.add_argument("bug", choices=BUGS)
    parser.add_argument("mount_point", type=Path)
    parser.add_argument("--source", type=Path, required=True)
    options = parser.parse_args()
    serve(BUGS[options.bug](options.source), options.mount_point, options.bug)
    return 0


if __name__ == "__main__":
    sys.exit(main())
