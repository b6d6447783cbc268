"""The lake's own mount with one planted bug of its memory, its checks or its leases: the checks have to see each.

python -m tests.mount.planted_lake BUG --server ADDRESS mount ... : `lake` with the bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

from cli.main import main as lake_main
from fuse import operations
from fuse.hot.hot_file import HotFile
from fuse.hot.hot_set import HotSet
from fuse.hot.kernel_backings import KernelBackings
from fuse.native import layer
from fuse.reading import blob_reader
from fuse.reading.native_reads import NativeReads
from fuse.state.mount import Mount
from lakefs.get.opened import Opened
from lakefs.grants.descriptors import SegmentDescriptors
from lakefs.grants.grant_reads import read_cached
from lakefs.ids import ChunkId
from lakefs.names import Name
from lakefs.wire.messages import Grant
from tests.planting import plant


def _backing_kept() -> None:
    """A hot file that was written to is given to the next file of its first content."""
    plant(HotFile, "is_changed", property(lambda hot: False))


def _check_left_out() -> None:
    """Bytes in the page cache are not compared with their checksums."""

    def unchecked(
        descriptors: SegmentDescriptors, chunk: ChunkId, grant: Grant, crcs: bytes, begin: int, target: memoryview
    ) -> bool:
        return read_cached(descriptors, grant, begin, target)

    plant(blob_reader, "cached_granules", unchecked)


def _written_through() -> None:
    """A handle that writes passes through to the backing file, past the mount."""
    real = KernelBackings.pass_through

    def pass_through(backings: KernelBackings, handle: int, backing_id: int, *, direct: bool) -> None:
        real(backings, handle, backing_id, direct=False)

    plant(KernelBackings, "pass_through", pass_through)


def _cached_beside_passthrough() -> None:
    """Every other handle of a file in memory is answered as if there were no such file."""
    real = HotSet.opened

    def opened(hot_set: HotSet, hot: HotFile, handle: int, flags: int) -> None:
        real(hot_set, hot, handle, flags)
        if hot.handles > 1:
            layer.take_back_open(handle)

    plant(HotSet, "opened", opened)


def _mappings_not_looked_at() -> None:
    """Nobody looks for bytes that a mapping wrote to a file in memory."""
    plant(HotFile, "differing", lambda hot: [])


def _lease_too_early() -> None:
    """The lease of an open file is given back as soon as it is open."""
    real = Mount.leased

    async def leased(mount: Mount, name: Name) -> Opened:
        opened = await real(mount, name)
        mount.give_back(opened.lease)
        return opened

    plant(Mount, "leased", leased)


def _native_reads_go_on() -> None:
    """Native threads answer reads from stored content that was written over."""
    plant(NativeReads, "close", lambda reads: None)
    kept: list[Any] = []
    real = NativeReads.__init__

    def begin(reads: NativeReads, *args: Any) -> None:
        kept.append(reads)
        real(reads, *args)

    plant(NativeReads, "__init__", begin)


def _open_asks_nobody() -> None:
    """A short file that was opened once is opened for ever with what it had then."""
    real, found = Mount.opened, dict[Name, Opened]()

    async def opened(mount: Mount, name: Name, size_bytes: int) -> Opened:
        if name not in found or found[name].lease:
            found[name] = await real(mount, name, size_bytes)
        return found[name]

    plant(Mount, "opened", opened)


def _close_stores_nothing() -> None:
    """A handle that writes is closed without asking."""
    plant(operations, "_STORING", 0)


def _nothing_staged() -> None:
    """A writer beside readers of a file in memory writes there alone."""
    real = HotFile.write

    def write(hot: HotFile, offset: int, data: Any, stage: Any) -> None:
        real(hot, offset, data, lambda *_: None)

    plant(HotFile, "write", write)


BUGS: Final[dict[str, Callable[[], None]]] = {
    "backing-kept": _backing_kept,
    "check-left-out": _check_left_out,
    "written-through": _written_through,
    "cached-beside-passthrough": _cached_beside_passthrough,
    "mappings-not-looked-at": _mappings_not_looked_at,
    "lease-too-early": _lease_too_early,
    "native-reads-go-on": _native_reads_go_on,
    "open-asks-nobody": _open_asks_nobody,
    "close-stores-nothing": _close_stores_nothing,
    "nothing-staged": _nothing_staged,
}


def lake_with(bug: str) -> list[str]:
    """Return the command `lake` with a bug."""
    return [sys.executable, "-m", "tests.mount.planted_lake", bug]


def main() -> None:
    """Plant the bug that the first argument names, and run `lake` with the others."""
    BUGS[sys.argv.pop(1)]()
    lake_main()


if __name__ == "__main__":
    main()
