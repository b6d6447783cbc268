"""Opens a store in a local folder, with real disk, threads and clock.

A store that this opening created is removed if the opening or its body fails and the caller does not keep it
(`is_kept`: a client may have seen it).  Files that existed before stay.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

from engine.fabric.engine_fabric import EngineFabric
from engine.host.clock import SystemClock
from engine.host.crash_marker import noting_crashes
from engine.host.io_queue import open_io_queue
from engine.host.local_disk import LocalDisk
from engine.store.opening import open_store
from engine.store.store import Store
from engine.superblock.superblock import LOCK_PATH, NO_CLUSTER, STORE_FOLDERS, SUPERBLOCK_PATH, OpenedStore
from engine.tiers.arena import Arena
from engine.tiers.dram_tier import DramTier
from lakefs.errors import LakeError
from lakefs.grants.dram_slabs import SLAB_BYTES
from lakefs.host.offload import ThreadOffload
from lakefs.limits import GC_GRACE_S

ENGINE_THREADS = 6
"""Threads of the pool: two cores' worth of hashing, and calls that wait for the disk."""


@asynccontextmanager
async def open_local_store(
    data: Path,
    *,
    grace_s: float = GC_GRACE_S,
    upload_expiry_s: float = 0.0,
    io_uring: bool = True,
    dram_tier_bytes: int = 0,
    fabric: EngineFabric | None = None,
    cluster_id: bytes = NO_CLUSTER,
    is_kept: Callable[[], bool] = lambda: True,
) -> AsyncIterator[Store]:
    """Open (or create) the store in a folder; stops it cleanly at the end.  Arguments and errors: see `open_store`.

    `io_uring`: read the disk through io_uring where the kernel allows it.
    `dram_tier_bytes`: memory of the DRAM tier, in whole slabs; 0: none.
    `fabric`: the RDMA device, which the caller closes afterwards.
    `cluster_id`: the lake that the store is a member of.
    `is_kept` is called when the body or the opening fails on a store just created; if it returns False, the store is
    removed.
    """
    disk = LocalDisk(data)
    others = _paths_in(data)

    @contextmanager
    def while_locked(opened: OpenedStore) -> Iterator[None]:
        try:
            with noting_crashes(disk):
                yield
        except BaseException:
            if opened.created and not is_kept():
                _discard(data, others)
            raise

    slabs_max = dram_tier_bytes // SLAB_BYTES
    with _removing_unfinished(disk, data, others, is_kept), ExitStack() as tiers:
        tier = tiers.enter_context(closing(DramTier(_arena(slabs_max, fabric)))) if slabs_max else None
        async with (
            ThreadOffload(ENGINE_THREADS, "lake") as offload,
            open_io_queue(offload, wanted=io_uring) as queue,
            open_store(
                disk,
                SystemClock(),
                offload,
                grace_s=grace_s,
                upload_expiry_s=upload_expiry_s,
                while_locked=while_locked,
                io_queue=queue,
                tier=tier,
                fabric=fabric,
                cluster_id=cluster_id,
            ) as store,
        ):
            yield store


def _arena(slabs_max: int, fabric: EngineFabric | None) -> Arena:
    return Arena(slabs_max) if fabric is None else Arena(slabs_max, registered=fabric.registered)


@contextmanager
def _removing_unfinished(
    disk: LocalDisk, data: Path, others: frozenset[Path], is_kept: Callable[[], bool]
) -> Iterator[None]:
    """Remove the files of an opening that failed before it wrote a superblock."""
    try:
        yield
    except BaseException:
        if not is_kept():
            _discard_unfinished(disk, data, others)
        raise


def _paths_in(data: Path) -> frozenset[Path]:
    """Return the paths in a data folder and in the folders of a store in it."""
    folders = (data, *(data / name for name in STORE_FOLDERS))
    return frozenset(path for folder in folders if folder.is_dir() for path in folder.iterdir())


def _discard_unfinished(disk: LocalDisk, data: Path, others: frozenset[Path]) -> None:
    """Remove an unfinished store; does nothing if another process is creating one there."""
    if not data.is_dir():
        return
    with suppress(LakeError), closing(disk.lock(LOCK_PATH)):
        if not disk.exists(SUPERBLOCK_PATH):
            _discard(data, others)


def _discard(data: Path, others: frozenset[Path]) -> None:
    """Remove a store that no client has seen, but no path in `others`, which existed before.  The lock is held."""
    for path in sorted(_paths_in(data) - others, reverse=True):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
