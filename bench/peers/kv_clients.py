"""The clients of the key-value scenarios: how each side moves blocks between its store and the client's pool.

A pool is memory allocated and touched before the calls.  Block i of a call is read into, or stored from, slot `first
+ i`. A client raises if any part of a call failed; arrived blocks are compared outside the timed part.  To add a
side: a class here, a line in `CLIENTS`, and a line in `bench.scenarios.kv`.
"""

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import blake3
import msgspec
from crc32c import crc32c

import lakefs
from lakefs.content.verify import Check
from lakefs.limits import GRANULE_BYTES
from lakefs.put.shared_memory import SharedMemory

OPENLAKE_KEY_BYTES: Final = 54
MOONCAKE_BUFFER_BYTES: Final = 64 << 20


class Spec(msgspec.Struct, frozen=True):
    """A client to create: `client` of `CLIENTS`, its server's `address`, and the folder `package` of its library.

    `slots` of `block_bytes` make the pool.  `local_bytes`: memory that the client gives to the store itself.
    """

    client: str
    address: str
    block_bytes: int
    slots: int
    package: str = ""
    local_bytes: int = 0


class KvClient(ABC):
    """One side's client, with its pool."""

    def __init__(self, spec: Spec) -> None:
        self.block_bytes = spec.block_bytes
        self.slots = spec.slots
        self.pool = self.make_pool(spec.slots * spec.block_bytes)
        for offset in range(0, len(self.pool), mmap.PAGESIZE):
            self.pool[offset] = 0

    def make_pool(self, size_bytes: int) -> memoryview:
        """Return memory for the pool: private, unless the side has its own kind."""
        return memoryview(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def slot(self, index: int) -> memoryview:
        """Return one slot of the pool."""
        return self.pool[index * self.block_bytes : (index + 1) * self.block_bytes]

    @abstractmethod
    def get(self, keys: Sequence[int], first: int) -> None:
        """Read the keys' blocks into slots."""

    def put(self, keys: Sequence[int], first: int) -> None:
        """Store slots as the keys' blocks."""
        raise NotImplementedError

    def drop(self, keys: Sequence[int]) -> None:
        """Remove blocks, uncounted.  Does nothing for a store that frees space by itself."""
        return

    def close(self) -> None:
        """Close the connection."""
        return


def address_of(memory: memoryview) -> int:
    """Return the address of writable memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# --- ours ------------------------------------------------------------------------------------------


class LakeClient(KvClient):
    """Our blocking client: `get_many_into`, `put_many`; with BLAKE3."""

    check = Check.BLAKE3

    def __init__(self, spec: Spec) -> None:
        self.lake = lakefs.connect(spec.address, check=self.check)
        super().__init__(spec)

    def name(self, key: int) -> str:
        """Return the object name of a key; each class of client has its own bucket."""
        return f"kv-{type(self).__name__.lower()}/{key:x}"

    def get(self, keys: Sequence[int], first: int) -> None:
        """Read straight into the slots."""
        slots = [self.slot(first + index) for index in range(len(keys))]
        self.lake.get_many_into([self.name(key) for key in keys], slots)

    def put(self, keys: Sequence[int], first: int) -> None:
        """Store the slots; durable on return."""
        objects = [(self.name(key), self.slot(first + index)) for index, key in enumerate(keys)]
        self.lake.put_many(objects, create_bucket=True)

    def drop(self, keys: Sequence[int]) -> None:
        """Remove the names, and let gc free the space."""
        for key in keys:
            self.lake.remove(self.name(key))
        self.lake.gc()

    def close(self) -> None:
        """Close the connection."""
        self.lake.close()


class LakeClientCrc(LakeClient):
    """The same with CRC32C."""

    check = Check.CRC32C


class LakeClientUnverified(LakeClient):
    """The same with no check."""

    check = Check.NONE


class LakeChunks(LakeClient):
    """Our blocking client, by ids of chunks: `lake.chunks`; with BLAKE3."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._ids: dict[int, bytes] = {}

    def get(self, keys: Sequence[int], first: int) -> None:
        """Read straight into the slots."""
        if len(keys) == 1:
            self.lake.chunks.get_into(self._ids[keys[0]], self.slot(first))
            return
        slots = [self.slot(first + index) for index in range(len(keys))]
        self.lake.chunks.get_many_into([self._ids[key] for key in keys], slots)

    def put(self, keys: Sequence[int], first: int) -> None:
        """Store objects of one chunk, and keep their ids."""
        objects = [(self.name(key), self.slot(first + index)) for index, key in enumerate(keys)]
        for key, stat in zip(keys, self.lake.put_many(objects, create_bucket=True), strict=True):
            self._ids[key] = bytes(stat.blob)


class LakeChunksCrc(LakeChunks):
    """The same with CRC32C."""

    check = Check.CRC32C


class LakeChunksUnverified(LakeChunks):
    """The same with no check."""

    check = Check.NONE


class LakeShared(LakeClient):
    """Our blocking client; its pool is memory shared with the engine."""

    def make_pool(self, size_bytes: int) -> memoryview:
        """Return memory that the engine copies from."""
        self._memory = SharedMemory(size_bytes)
        return self._memory.buffer

    def put(self, keys: Sequence[int], first: int) -> None:
        """Store the slots; durable on return; no payload passes the socket."""
        self.lake.put_many(
            [
                (self.name(key), self._memory.slot((first + index) * self.block_bytes, self.block_bytes))
                for index, key in enumerate(keys)
            ],
            create_bucket=True,
        )


# --- peers -----------------------------------------------------------------------------------------


class OpenLake(KvClient):
    """OpenLake's client over shared memory: its device `local`."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        sys.path.insert(0, spec.package)
        module: Any = importlib.import_module("openlake_client")
        self._begin = address_of(self.pool)
        self._client = module.Client(device="local", client_id=2048)
        self._client.register_memory(self._begin, len(self.pool))
        self._client.attach(spec.address, 0, spec.block_bytes + OPENLAKE_KEY_BYTES)

    def _places(self, keys: Sequence[int], first: int) -> tuple[list[bytes], list[list[int]], list[list[int]]]:
        names = [key.to_bytes(OPENLAKE_KEY_BYTES, "little") for key in keys]
        places = [[self._begin + (first + index) * self.block_bytes] for index in range(len(keys))]
        return names, places, [[self.block_bytes]] * len(keys)

    def get(self, keys: Sequence[int], first: int) -> None:
        """Call `get_batch`."""
        _none_failed(self._client.get_batch(*self._places(keys, first)))

    def put(self, keys: Sequence[int], first: int) -> None:
        """Call `put_batch`."""
        _none_failed(self._client.put_batch(*self._places(keys, first)))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class Mooncake(KvClient):
    """Mooncake's client over TCP on loopback; `local_bytes`: its own memory is the store's."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._begin = address_of(self.pool)
        master, _, own = spec.address.partition(" ")
        self._store = mooncake_store(spec.package, own, master, spec.local_bytes)
        if code := self._store.register_buffer(self._begin, len(self.pool)):
            raise RuntimeError(f"register_buffer: {code}")

    def _places(self, keys: Sequence[int], first: int) -> tuple[list[str], list[int], list[int]]:
        places = [self._begin + (first + index) * self.block_bytes for index in range(len(keys))]
        return [f"{key:x}" for key in keys], places, [self.block_bytes] * len(keys)

    def get(self, keys: Sequence[int], first: int) -> None:
        """Call `get_into`, or `batch_get_into`."""
        names, places, sizes = self._places(keys, first)
        if len(keys) == 1:
            _none_failed([self._store.get_into(names[0], places[0], sizes[0])])
        else:
            _none_failed(self._store.batch_get_into(names, places, sizes))

    def put(self, keys: Sequence[int], first: int) -> None:
        """Call `batch_put_from`."""
        _none_failed(self._store.batch_put_from(*self._places(keys, first)))

    def drop(self, keys: Sequence[int]) -> None:
        """Remove the blocks: the store refuses new ones when it is full of recent ones."""
        self._store.batch_remove([f"{key:x}" for key in keys], True)

    def close(self) -> None:
        """Close the connection."""
        self._store.close()


def mooncake_store(package: str, own: str, master: str, given_bytes: int) -> Any:
    """Return a member of a Mooncake store that gives so much memory to it.  RuntimeError."""
    sys.path.insert(0, package)
    module: Any = importlib.import_module("mooncake.store")
    store = module.MooncakeDistributedStore()
    code = store.setup(own, "P2PHANDSHAKE", given_bytes, MOONCAKE_BUFFER_BYTES, "tcp", "", master)
    if code:
        raise RuntimeError(f"setup: {code}")
    return store


def _none_failed(codes: Sequence[int]) -> None:
    failed = [code for code in codes if code < 0]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(codes)} failed, the first with {failed[0]}")


# --- limits ----------------------------------------------------------------------------------------


class PlainFiles(KvClient):
    """A file for each block below the folder `address`; a put syncs its file."""

    def _path(self, key: int) -> str:
        return os.path.join(self._folder, f"{key:x}")

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._folder = spec.address

    def get(self, keys: Sequence[int], first: int) -> None:
        """Open, read and close each file."""
        for index, key in enumerate(keys):
            with open(self._path(key), "rb", buffering=0) as file:
                if file.readinto(self.slot(first + index)) != self.block_bytes:
                    raise RuntimeError("a file is too short")

    def put(self, keys: Sequence[int], first: int) -> None:
        """Write and sync each file."""
        for index, key in enumerate(keys):
            with open(self._path(key), "wb", buffering=0) as file:
                file.write(self.slot(first + index))
                os.fdatasync(file.fileno())

    def drop(self, keys: Sequence[int]) -> None:
        """Remove the files."""
        for key in keys:
            Path(self._path(key)).unlink()


class DirectWrites(KvClient):
    """Blocks one after the other in one file, with O_DIRECT, and one fdatasync per call: the limit of a disk."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC
        self._file = os.open(Path(spec.address, "direct"), flags, 0o600)
        self._places: dict[int, int] = {}

    def get(self, keys: Sequence[int], first: int) -> None:
        """Read each block from its place."""
        for index, key in enumerate(keys):
            os.preadv(self._file, [self.slot(first + index)], self._places[key])

    def put(self, keys: Sequence[int], first: int) -> None:
        """Write the blocks in order, then sync."""
        for index, key in enumerate(keys):
            place = self._places[key] = len(self._places) * self.block_bytes
            os.pwritev(self._file, [self.slot(first + index)], place)
        os.fdatasync(self._file)

    def drop(self, keys: Sequence[int]) -> None:
        """Begin again at the start of the file, in space already allocated."""
        self._places.clear()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Copies(KvClient):
    """Blocks in this process; a get copies them by one thread, and checks them as the class says."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self._blocks: dict[int, memoryview] = {}

    def get(self, keys: Sequence[int], first: int) -> None:
        """Copy, and check the copy."""
        for index, key in enumerate(keys):
            target = self.slot(first + index)
            target[:] = self._blocks[key]
            self.check(target)

    def check(self, block: memoryview) -> None:
        """Check nothing."""

    def put(self, keys: Sequence[int], first: int) -> None:
        """Copy into memory that is touched for the first time."""
        for index, key in enumerate(keys):
            self._blocks[key] = memoryview(bytes(self.slot(first + index)))

    def drop(self, keys: Sequence[int]) -> None:
        """Forget the blocks."""
        for key in keys:
            del self._blocks[key]


class CopiesBlake3(Copies):
    """Copies with a BLAKE3 of each copy."""

    def check(self, block: memoryview) -> None:
        """Hash the whole block."""
        blake3.blake3(block).digest()


class CopiesCrc(Copies):
    """Copies with a CRC32C of each copy."""

    def check(self, block: memoryview) -> None:
        """Checksum each granule."""
        for begin in range(0, len(block), GRANULE_BYTES):
            crc32c(block[begin : begin + GRANULE_BYTES])


class Nothing(KvClient):
    """Does nothing: the cost of the measuring itself."""

    def get(self, keys: Sequence[int], first: int) -> None:
        """Read nothing."""

    def put(self, keys: Sequence[int], first: int) -> None:
        """Store nothing."""


CLIENTS: Final[dict[str, Callable[[Spec], KvClient]]] = {
    "lake": LakeClient,
    "lake-crc": LakeClientCrc,
    "lake-none": LakeClientUnverified,
    "lake-chunks": LakeChunks,
    "lake-chunks-crc": LakeChunksCrc,
    "lake-chunks-none": LakeChunksUnverified,
    "lake-shared": LakeShared,
    "openlake": OpenLake,
    "mooncake": Mooncake,
    "files": PlainFiles,
    "direct": DirectWrites,
    "copies": Copies,
    "copies-blake3": CopiesBlake3,
    "copies-crc": CopiesCrc,
    "nothing": Nothing,
}
