"""Blocks of a KV cache between a store and a client's pool: one, or 16 in a call; ours, peers, and the limit of
memory.

All sides move the same blocks by the same loop, each in its own process (`bench.peers.kv_worker`).  The blocks that
are read are in memory on all of them: ours and plain files in the page cache, OpenLake in shared memory, Mooncake in
the memory of another process (over TCP on loopback) or of the client itself.  A side's name states what it promises;
ours checks with BLAKE3 unless its name says otherwise, gets chunks by their ids, and puts objects from memory shared
with the engine.
"""

from __future__ import annotations

from typing import Final

from bench.harness.measure import Scenario, at_least, at_most
from bench.harness.sampled import OURS, Target
from bench.peers.kv_contest import KvSide, Moved, kv_scenario
from bench.peers.kv_servers import STORE_BYTES
from bench.peers.packages import MOONCAKE_VERSION, OPENLAKED_VERSION

KIB: Final = 1 << 10
MIB: Final = 1 << 20
RATE: Final = "bytes_per_s"

OPENLAKE: Final = f"openlake {OPENLAKED_VERSION}, in memory"
MOONCAKE: Final = f"mooncake {MOONCAKE_VERSION}, in memory"
FILES: Final = "files, synced each"
DIRECT: Final = "O_DIRECT, synced each call"
COPY: Final = "copy"
COPY_BLAKE3: Final = "copy + BLAKE3"
NOTHING: Final = "nothing"
CRC32C: Final = f"{OURS}, CRC32C"
UNVERIFIED: Final = f"{OURS}, unverified"
PEERS: Final = (
    KvSide(OPENLAKE, "openlake", "openlaked", touched_bytes=STORE_BYTES),
    KvSide(MOONCAKE, "mooncake", "mooncake"),
    KvSide("mooncake, in the client's memory", "mooncake", "mooncake-master", local_bytes=STORE_BYTES),
)
GETS: Final = (
    KvSide(OURS, "lake-chunks", "engine"),
    KvSide(CRC32C, "lake-chunks-crc", "engine"),
    KvSide(UNVERIFIED, "lake-chunks-none", "engine"),
    KvSide("ours, by name", "lake", "engine"),
    KvSide("ours, by name, CRC32C", "lake-crc", "engine"),
    *PEERS,
    KvSide("files", "files", "folder"),
    KvSide(COPY, "copies", "folder"),
    KvSide("copy + CRC32C", "copies-crc", "folder"),
    KvSide(COPY_BLAKE3, "copies-blake3", "folder"),
    KvSide(NOTHING, "nothing", "folder", reads=False),
)
"""Sides of the scenarios that read; add a side here.  The others are compared with the first."""
PUTS: Final = (
    KvSide(OURS, "lake-shared", "engine"),
    KvSide("ours, through the socket", "lake", "engine"),
    *PEERS,
    KvSide(FILES, "files", "folder"),
    KvSide(DIRECT, "direct", "folder"),
    KvSide(COPY, "copies", "folder"),
    KvSide(NOTHING, "nothing", "folder", reads=False),
)
"""Sides of the scenarios that write."""

AHEAD: Final = tuple(Target(RATE, at_least(1, "x"), peer) for peer in (OPENLAKE, MOONCAKE))
HASHED: Final = Target(RATE, at_least(0.7, "x"), COPY_BLAKE3)
LIKE_FOR_LIKE: Final = (
    Target(RATE, at_least(0.9, "x"), COPY, UNVERIFIED),
    Target(RATE, at_least(1, "x"), OPENLAKE, UNVERIFIED),
)
"""Goals for our unverified side, since the peers do not verify either."""
SINGLY: Final = (Target("p50_us", at_most(20, "us")), Target("p50_us", at_most(12, "us"), side=CRC32C))


def _scenario(name: str, moved: Moved, *targets: Target) -> Scenario:
    size = moved.block_bytes
    text = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
    how = f"{text}, one by one" if moved.batch == 1 else f"{moved.batch} x {text} in a call"
    return kv_scenario(
        f"kv-{name}",
        f"{moved.what} of {how}",
        moved,
        GETS if moved.what == "get" else PUTS,
        targets=targets,
        generator=NOTHING,
        expected_s=37,
    )


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _scenario("get-64k", Moved("get", 64 * KIB, 1, 32, 2000), *SINGLY, *AHEAD),
    _scenario("get-64k-16", Moved("get", 64 * KIB, 16, 1024, 400), *AHEAD, HASHED, *LIKE_FOR_LIKE),
    _scenario("get-1m-16", Moved("get", MIB, 16, 128, 40), *AHEAD, HASHED, *LIKE_FOR_LIKE),
    _scenario("put-64k-16", Moved("put", 64 * KIB, 16, 64, 40)),
    _scenario("put-1m-16", Moved("put", MIB, 16, 64, 16), Target(RATE, at_least(0.8, "x"), DIRECT)),
)
