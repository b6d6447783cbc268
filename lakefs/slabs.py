"""Slabs: the engine's DRAM tier as a client sees it, memory that is mapped read-only and copied from.

A slab is a sealed memfd of the engine, cut into slots; a slot holds one chunk's payload and, behind it, its vector of
CRCs, as an extent of a segment does.  Each slot has a *generation*, a number in one more memfd: even while the slot
holds what it was granted for, odd while the engine changes it, and never the same again.  A grant of medium 3 names
slab, offset and generation.

Rules kept here:
- Bytes are copied between two looks at the generation, and what is copied is then checked as any bytes are: the
  generation saves work and finds what is stale early, correctness rests on the check.
- Only memory that its maker can neither shrink nor lend for writing is mapped (its seals are looked at): a mapping of
  anything else might be a SIGBUS.
- The mapping is read-only for good: the kernel refuses to make it, or the descriptor, writable.

Where generations lie: that of the slot at `offset` of slab `n` is number `(n * slab_bytes + offset) // UNIT_BYTES`, 8
bytes each, in the machine's order.  No two slots share one: each begins in a unit of its own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Sequence
from typing import Final

from lakefs.errors import StaleGrant
from lakefs.limits import KIB, MIB
from lakefs.wire.messages import Grant

SLAB_BYTES: Final = 64 * MIB
UNIT_BYTES: Final = 16 * KIB
"""The shortest slot."""
GENERATION_BYTES: Final = 8
F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1; Python has no name for it before 3.13."""
SEALS: Final = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
"""What the engine seals a slab with."""
_SEALS_NEEDED: Final = fcntl.F_SEAL_SHRINK


def generation_number(slab: int, offset: int, slab_bytes: int) -> int:
    """Which generation is that of the slot at `offset` of a slab."""
    return (slab * slab_bytes + offset) // UNIT_BYTES


class Slabs:
    """The slabs of one engine that this client has mapped.  Used from any of the client's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slabs: dict[int, memoryview] = {}
        self._generations: memoryview | None = None
        self._arena: tuple[int, int] | None = None
        """Which file the generations are."""
        self._slab_bytes = SLAB_BYTES

    def missing(self, slabs: set[int]) -> list[int]:
        """Those of `slabs` that are not mapped."""
        with self._lock:
            return sorted(slab for slab in slabs if slab not in self._slabs)

    def add(self, slabs: Sequence[int], descriptors: Sequence[int], slab_bytes: int) -> None:
        """Map what the engine sent: a descriptor for each slab, and behind them that of the generations.

        All descriptors are taken over.  What is not sealed, or short, is left out, as if it had not been sent.  With
        generations of another engine the slabs that were there are forgotten: they are that of the one before.
        """
        held = list(zip(slabs, descriptors, strict=False))
        arena = _file_of(descriptors[len(held)]) if len(descriptors) > len(held) else None
        mapped = {slab: _mapped(descriptor, slab_bytes) for slab, descriptor in held}
        generations = (
            _mapped(descriptors[len(held)], GENERATION_BYTES) if len(descriptors) > len(held) else None
        )
        for descriptor in descriptors[len(held) + 1 :]:
            os.close(descriptor)
        with self._lock:
            if generations is not None and arena != self._arena:
                self._slabs.clear()
                self._arena = arena
            self._slab_bytes = slab_bytes
            for slab, found in mapped.items():
                if found is not None:
                    self._slabs.setdefault(slab, found)
            if generations is not None:  # last: they are looked at before a slab is
                size = len(generations) // GENERATION_BYTES * GENERATION_BYTES
                self._generations = generations[:size].cast("Q")

    def is_current(self, grant: Grant) -> bool:
        """Whether the slot still holds what the grant was given for; False when its slab is not mapped."""
        generations = self._generations
        number = generation_number(grant.segment, grant.offset, self._slab_bytes)
        return (
            generations is not None
            and grant.segment in self._slabs
            and number < len(generations)
            and generations[number] == grant.epoch
        )

    def view(self, grant: Grant, begin: int, length: int) -> memoryview:
        """Bytes of the slot from `begin` on, as they are and will be: read-only.  StaleGrant.

        They may become another chunk's at any time, unless the chunk is pinned: `is_current` afterwards tells.
        """
        if not self.is_current(grant):
            raise _stale(grant)
        found = self._slabs.get(grant.segment)
        if found is None:
            raise _stale(grant)
        start = grant.offset + begin
        if begin < 0 or length < 0 or grant.offset < 0 or start + length > len(found):
            raise _stale(grant)
        return found[start : start + length]

    def copy(self, grant: Grant, begin: int, target: memoryview) -> None:
        """Fill `target` with the slot's bytes from `begin` on.  StaleGrant when the slot was used anew meanwhile."""
        target[:] = self.view(grant, begin, len(target))
        if not self.is_current(grant):
            raise _stale(grant)

    def drop(self) -> None:
        """Forget all slabs, as when the connection to their engine is lost; memory goes when nobody views it."""
        with self._lock:
            self._slabs.clear()
            self._generations = self._arena = None

    def __len__(self) -> int:
        return len(self._slabs)


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _mapped(descriptor: int, size_min: int) -> memoryview | None:
    """The memory of a descriptor, mapped read-only; None when it must not be or cannot be.  It is closed."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        if seals & _SEALS_NEEDED != _SEALS_NEEDED or size < size_min:
            raise ValueError("not a sealed slab")
        return memoryview(mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)


def _stale(grant: Grant) -> StaleGrant:
    return StaleGrant(f"slot {grant.offset} of slab {grant.segment} holds something else by now")
