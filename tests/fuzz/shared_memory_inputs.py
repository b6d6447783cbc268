"""The native readers of memory that another process writes, fed with memory that is changed at random.

`_table` and `_keys` read the shared index; `_known` reads it too, and stamps, slabs and segments; `_batch_plan` reads
places, slabs and segments.  An engine that errs, or lies, may have written anything there, and may write while it is
read: no reader may touch a byte outside of its memory.  Each memory is an allocation of its own length, so that the
sanitizers notice a byte behind it.

`sanitized_modules` builds them, and runs this in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

from lakefs.host.crc import crc32c
from lakefs.limits import GRANULE_BYTES, HOT_INDEX_SLOTS_MIN
from lakefs.shared_index.table_format import ENTRIES_OFFSET, ENTRY_BYTES, PLACE, PROBE_SLOTS, table_bytes
from tests.fuzz.sanitized_modules import BATCH_PLAN, KEYS, KNOWN, TABLE, load

_SLOTS: Final = HOT_INDEX_SLOTS_MIN
_CELL_BYTES: Final = 16 << 10
_SLAB_BYTES: Final = 16 * _CELL_BYTES
_SLAB: Final = 1
_GENERATION: Final = 4
_SEGMENT: Final = 7
_STAMPS: Final = 8
_STAMPS_OFFSET: Final = 4096
_ENTRY: Final = struct.Struct("<IBBH32sQIII")
_SIZES: Final = (1, 700, 4096, GRANULE_BYTES, GRANULE_BYTES + 1, 3 * GRANULE_BYTES + 5, 256 << 10)
_SPACE: Final = 3


# --- memory ----------------------------------------------------------------------------------------------------------


def _exact(content: bytes | int) -> memoryview:
    """Return memory in an allocation of its own length (a bytearray has a byte more)."""
    length = content if isinstance(content, int) else len(content)
    memory = memoryview((ctypes.c_uint8 * length)()).cast("B")
    if not isinstance(content, int):
        memory[:] = content
    return memory


def _entry(chunk: bytes, tier: int, distance: int, place: tuple[int, int, int, int]) -> bytes:
    """Return the bytes of an entry that passes its check."""
    segment, offset, stored_bytes, crc = place
    raw = _ENTRY.pack(2, chunk[0], tier, distance, chunk[1:], segment, offset, stored_bytes, crc)
    return raw + crc32c(raw).to_bytes(4, "little")


def _home(chunk: bytes) -> int:
    return int.from_bytes(chunk[1:9], "little") >> 64 - _SLOTS.bit_length() + 1


def _number(drawn: Random, bits: int) -> int:
    """Return a number that is often near an end of its range, or a power of two."""
    near = (1 << drawn.randrange(bits + 1)) + drawn.randrange(-2, 3)
    return (near if drawn.randrange(3) else drawn.getrandbits(bits)) & ((1 << bits) - 1)


def _place(drawn: Random, stored_bytes: int) -> tuple[int, tuple[int, int, int, int]]:
    """Return a tier and a place of it, more often than not one that could be."""
    if drawn.randrange(2):
        tier, segment, room = 1, _SEGMENT, _SLAB_BYTES
    else:
        tier, segment, room = 3, _SLAB << 48 | _GENERATION, _SLAB_BYTES
    offset = drawn.randrange(room + 1)
    if not drawn.randrange(6):
        segment = _number(drawn, 64)
    if not drawn.randrange(6):
        offset = _number(drawn, 32)
    if not drawn.randrange(6):
        stored_bytes = _number(drawn, 32)
    return tier if drawn.randrange(12) else drawn.randrange(256), (segment, offset, stored_bytes, drawn.getrandbits(32))


def _changed(drawn: Random, memory: memoryview, begin: int) -> None:
    """Change some bytes from `begin` on."""
    for _ in range(drawn.randrange(6)):
        at = drawn.randrange(begin, len(memory))
        memory[at] = drawn.choice((0, 1, 255, drawn.randrange(256)))
    if not drawn.randrange(8):
        at = drawn.randrange(begin, len(memory))
        length = min(drawn.randrange(1, 200), len(memory) - at)
        memory[at : at + length] = drawn.randbytes(length)


class _Index:
    """The memory of a table, written by hand, and the chunks that it was made for."""

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks = chunks
        self.memory = _exact(table_bytes(_SLOTS))

    def write(self, drawn: Random, sizes: dict[bytes, int]) -> None:
        """Write all anew: places for most chunks, a long run now and then, and changed bytes."""
        memory = self.memory
        memory[:] = bytes(len(memory))
        if not drawn.randrange(3):  # a run that ends nowhere
            for slot in range(drawn.randrange(_SLOTS + PROBE_SLOTS), _SLOTS + PROBE_SLOTS):
                self._put(slot, _entry(bytes([1]) + drawn.randbytes(32), 1, 0xFFFF, (1, 1, 1, 1)))
        for chunk in self.chunks:
            if drawn.randrange(8):
                distance = drawn.choice((0, 0, 0, 1, PROBE_SLOTS - 1))
                tier, place = _place(drawn, sizes.get(chunk, 100))
                if not drawn.randrange(6):
                    tier = drawn.randrange(16, 21)  # of keys, and spaces
                self._put(_home(chunk) + distance, _entry(chunk, tier, distance, place))
        if drawn.randrange(2):
            _changed(drawn, memory, 4096)

    def _put(self, slot: int, entry: bytes) -> None:
        at = ENTRIES_OFFSET + slot * ENTRY_BYTES
        self.memory[at : at + ENTRY_BYTES] = entry


@contextmanager
def _written_at_once(index: _Index, drawn: Random, sizes: dict[bytes, int]) -> Iterator[None]:
    """Have a thread that writes an index, without the interpreter's lock, while the block runs."""
    done = threading.Event()
    with tempfile.TemporaryFile() as file:
        for _ in range(8):
            index.write(drawn, sizes)
            file.write(index.memory)
        file.flush()

        def write() -> None:
            while not done.is_set():
                for turn in range(8):
                    os.preadv(file.fileno(), [index.memory], turn * len(index.memory))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            yield
        finally:
            done.set()
            writer.join()


# --- parts -----------------------------------------------------------------------------------------------------------


def _chunks(drawn: Random, count: int) -> list[bytes]:
    """Return ids; some are at home in the last slots."""
    made = [bytearray(bytes([1 + drawn.randrange(2)]) + drawn.randbytes(32)) for _ in range(count)]
    for chunk in made[: count // 4]:
        chunk[7:9] = b"\xff\xff"
    return [bytes(chunk) for chunk in made]


def _feed_table(drawn: Random, inputs: int) -> int:
    table_module, keys_module = importlib.import_module(TABLE), importlib.import_module(KEYS)
    keys = [drawn.randbytes(drawn.randrange(1, 65)) for _ in range(70)]
    chunks = [*_chunks(drawn, 60), *(keys_module.key_id(_SPACE, key) for key in keys)]
    index = _Index(chunks)
    found = 0

    def read() -> int:
        table: Any = table_module.SharedTable(index.memory.toreadonly(), _SLOTS)
        places = sum(table.find(chunk) is not None for chunk in chunks[20:28])
        table.find_many(chunks)
        table.find_packed(chunks, _exact(PLACE.size * len(chunks)))
        some = drawn.sample(chunks, drawn.randrange(1, 5))
        table.pack_grants(some)
        table.pack_grants(some, [None if drawn.randrange(2) else (1, 1, 1, 1, 1) for _ in some])
        finder = keys_module.KeyFinder(table)
        finder.plan(_SPACE, keys, [100] * len(keys))
        finder.match(_SPACE, keys[: drawn.randrange(1, 70)])
        finder.match(_SPACE, keys, [100] * len(keys))
        return int(places > 0)

    for _ in range(inputs):
        index.write(drawn, {})
        found += read()
        writer: Any = table_module.SharedTable(index.memory, _SLOTS)
        if writer.audit():  # else the engine makes a table anew
            for chunk in chunks:
                writer.put(chunk, 1, 1, 1, 1, 1)
            for chunk in chunks:
                writer.remove(chunk)
            writer.clear()
    with _written_at_once(index, drawn, {}):
        for _ in range(inputs):
            read()
            table_module.SharedTable(index.memory.toreadonly(), _SLOTS).audit()
    return found


class _Stamps:
    """Stamps in memory of this process, as `StampReader` hands them on."""

    _NAME: Final = ctypes.c_char_p(b"lake_stamps")

    def __init__(self) -> None:
        self.memory = _exact(_STAMPS_OFFSET + 8 * _STAMPS)
        address = ctypes.addressof(ctypes.c_uint8.from_buffer(self.memory))
        self._handed_on = (ctypes.c_uint64 * 2)(address, _STAMPS)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.native = make(ctypes.addressof(self._handed_on), self._NAME, None)

    def write(self, drawn: Random) -> None:
        """Write the header of an engine that lives; counters are 0, but for changes."""
        self.memory[:] = bytes(len(self.memory))
        self.memory[:24] = struct.pack("<8sIIQ", b"LAKESTMP", 1, 0, _STAMPS)
        self.memory[64:68] = struct.pack("<I", 1)
        if not drawn.randrange(4):
            self.memory[drawn.choice((0, 8, 16, 24, 64, 67))] = drawn.randrange(256)
            _changed(drawn, self.memory, _STAMPS_OFFSET)


class _Slabs(NamedTuple):
    generations: memoryview
    slabs: dict[int, memoryview]


def _slabs(drawn: Random) -> _Slabs:
    """Return generations and slabs, some of which are shorter than they should be."""
    count = 2 * _SLAB_BYTES // _CELL_BYTES
    generations = _exact(struct.pack(f"<{count}Q", *[_GENERATION] * count))
    if drawn.randrange(2):
        _changed(drawn, generations, 0)
    if not drawn.randrange(4):
        generations = _exact(bytes(generations)[: 8 * drawn.randrange(1, count)])
    length = _SLAB_BYTES if drawn.randrange(4) else drawn.randrange(1, _SLAB_BYTES)
    return _Slabs(generations, {_SLAB: _exact(length)})


def _feed_known(drawn: Random, inputs: int) -> int:
    table_module, known_module = importlib.import_module(TABLE), importlib.import_module(KNOWN)
    chunks = _chunks(drawn, 24)
    sizes = {chunk: drawn.choice(_SIZES) for chunk in chunks}
    index, stamps = _Index(chunks), _Stamps()
    found = 0
    with tempfile.TemporaryFile() as file:
        file.write(bytes(_SLAB_BYTES))
        file.flush()

        def known_now() -> Any:
            known: Any = known_module.KnownTable(drawn.choice((2048, 1 << 20)))
            known.use_stamps(stamps)
            known.use_places(table_module.SharedTable(index.memory.toreadonly(), _SLOTS))
            known.use_segment(_SEGMENT, file.fileno(), 0)
            slabs = _slabs(drawn)
            known.use_slabs(slabs.generations.toreadonly(), _SLAB_BYTES, slabs.slabs)
            return known

        def read(known: Any) -> int:
            stamps_of = [struct.pack("<IQ", _number(drawn, 32) if not drawn.randrange(9) else 0, 0) for _ in chunks]
            names = [f"bucket/{number}" for number in range(len(chunks))]
            known.learn(
                [(*named, b"stat", chunk, sizes[chunk]) for *named, chunk in zip(names, stamps_of, chunks, strict=True)]
            )
            standing = sum(known.stat(name) is not None for name in names)
            for name in names:
                known.read(name)
                known.read(name, True)
            many: list[Any] = []
            targets = [_exact(drawn.choice((sizes[chunk], sizes[chunk] - 1)) or 1) for chunk in chunks]
            known.read_many(names, many, 4 << 20, targets)
            known.stand(names, many)
            return int(standing > 0)

        for _ in range(inputs):
            index.write(drawn, sizes)
            stamps.write(drawn)
            found += read(known_now())
        with _written_at_once(index, drawn, sizes):
            for _ in range(inputs):
                read(known_now())
    return found


def _feed_plan(drawn: Random, inputs: int) -> int:
    module = importlib.import_module(BATCH_PLAN)
    helper: Any = module.HelperThread()
    found = 0
    with tempfile.TemporaryFile() as file:
        file.write(bytes(_SLAB_BYTES))
        file.flush()
        for _ in range(inputs):
            sizes = [drawn.choice(_SIZES) for _ in range(drawn.randrange(1, 20))]
            places = []
            for size in sizes:
                tier, (segment, offset, stored_bytes, crc) = _place(drawn, size)
                places.append(PLACE.pack(segment, offset, stored_bytes, crc, tier))
            targets = [_exact(size if drawn.randrange(4) else drawn.randrange(1, size + 1)) for size in sizes]
            chunks = [bytes([drawn.randrange(1, 3)]) + bytes(32) for _ in sizes]
            longest = drawn.choice((100, GRANULE_BYTES, 1 << 30))
            plan: Any = module.ReadPlan(
                chunks, targets, _exact(b"".join(places)), longest, bool(drawn.randrange(2)), bool(drawn.randrange(2))
            )
            found += plan.runs + plan.slots > 0
            _use(plan, drawn, file.fileno(), helper, len(sizes))
    helper.close()
    return found


def _use(plan: Any, drawn: Random, file: int, helper: Any, count: int) -> None:
    files = [(file, 0) if drawn.randrange(8) else None for _ in plan.segments]
    slabs = _slabs(drawn)
    plan.copy(0, count, slabs.generations, slabs.slabs, _SLAB_BYTES)
    for first, stop in plan.parts(_number(drawn, 20)):
        plan.read(first, stop, files)
    lengths = [-1] * count
    plan.read_lengths(0, plan.runs, files, lengths)
    plan.read_checked(files, lengths, helper if drawn.randrange(2) else None)
    assert len(plan.others) <= count


PARTS: Final[dict[str, Callable[[Random, int], int]]] = {"table": _feed_table, "known": _feed_known, "plan": _feed_plan}


def main() -> None:
    """Feed one part of what is built in a folder; prints how many inputs had something to find."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--built", type=Path, required=True)
    parser.add_argument("--part", choices=PARTS, required=True)
    asked = parser.parse_args()
    load(asked.built, asked.part)
    sys.setswitchinterval(1e-5)
    sys.stdout.write(f"{PARTS[asked.part](Random(asked.seed), asked.inputs)}\n")


if __name__ == "__main__":
    main()
