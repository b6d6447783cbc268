"""Scrub: reads every live payload from the medium and compares it with its CRC32C and its BLAKE3, again and again.

A shard is compared with its CRC32C only: its bytes do not hash to its chunk's id.

A pass walks the table of chunks in the order of its keys, a page at a time.  The chunks of a page are read in the order
of their places, past the page cache (`stored_check`).  A chunk that does not match is read once more by itself, then
quarantined; a quarantined chunk that is good is released.

Rules kept here:
- The position of a pass is in the table `counters`, committed like any other change: every 10 s, at the end of the
  pass, and at a clean stop.  A restart continues there; chunks checked since are checked again.
- A page takes about a second at the given rate, at most 64 MiB and 16,384 chunks, so that small chunks that are
  neighbours on the medium are mostly in one page.  Memory is two runs of 4 MiB, and a page's records, 10 MB.
- The rate is kept batch by batch; at most two threads of the pool are used, one if there is a rate.
- One pass at a time.  A chunk stored behind the position of the pass waits for the next one.

It runs in the task that calls `advance`: the engine's own periodic one, and those of requests.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import chain, islice
from typing import Any, Final

import msgspec
import structlog
import trio

from engine.chunks.chunk_store import Chunks, find_shard
from engine.chunks.quarantine import Quarantine
from engine.format.layouts import Table, chunk_id_of_key, unpack_chunk_record
from engine.format.shards import shard_of_key
from engine.host.failpoints import reached
from engine.host.tasks import run_all
from engine.metadata.metadata_store import Metadata
from engine.segments.segment_store import Segments
from engine.segments.stored_check import Mismatch, Stored, batches_of, bytes_of, new_area, runs_of
from lakefs.errors import LakeError, StaleGrant
from lakefs.ids import ChunkKind
from lakefs.limits import GC_BATCH, MIB, SCRUB_RATE_BYTES_PER_S
from lakefs.ports import Clock

STATE_KEY: Final = b"scrub"
SAVE_INTERVAL_S: Final = 10.0
PAGE_BYTES_MAX: Final = 64 * MIB
PAGE_RECORDS_MAX: Final = 16_384
_UNBOUNDED_AT_ONCE: Final = 2
_END: Final = b"\xff"
_log: Final = structlog.get_logger(__name__)


class ScrubRecord(msgspec.Struct, array_like=True, frozen=True):
    """The position of scrub, as stored: msgpack array."""

    version: int = 1
    after: bytes = b""
    """Key of the last chunk checked in this pass; empty: no pass is under way."""
    began_ns: int = 0
    chunks: int = 0
    payload_bytes: int = 0
    damaged: int = 0
    passes: int = 0
    """Count of finished passes; the fields below describe the last of them."""
    last_began_ns: int = 0
    last_ended_ns: int = 0
    last_chunks: int = 0
    last_payload_bytes: int = 0
    last_damaged: int = 0


@dataclass
class Totals:
    """Sums since the start of this process; they only grow."""

    chunks: int = 0
    payload_bytes: int = 0
    damaged: int = 0
    released: int = 0
    passes: int = 0


class Scrubber:
    """The scrub of one store.  Used on the loop."""

    def __init__(
        self,
        metadata: Metadata,
        segments: Segments,
        chunks: Chunks,
        quarantine: Quarantine,
        clock: Clock,
        *,
        rate_bytes_per_s: int = SCRUB_RATE_BYTES_PER_S,
    ) -> None:
        """`rate_bytes_per_s` is the rate for callers that give none; 0: no limit."""
        self.rate_bytes_per_s = rate_bytes_per_s
        self.totals = Totals()
        self._metadata = metadata
        self._segments = segments
        self._chunks = chunks
        self._quarantine = quarantine
        self._clock = clock
        self.state = self._saved = _load(metadata)
        """The position of scrub, with its counts."""
        self._saved_at = clock.monotonic()
        self._next_at = clock.monotonic()
        self._lock = trio.Lock()
        self._areas: list[memoryview] = []

    # --- state -----------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """True while a task is reading."""
        return self._lock.locked()

    @property
    def position(self) -> float:
        """The share of this pass that is done, 0 to 1, by the order of keys."""
        after = self.state.after
        if not after:
            return 0.0
        if after[0] != ChunkKind.DATA:
            return 1.0  # manifests are last, and few
        return int.from_bytes(after[3:11], "big") / 2**64

    def status(self) -> dict[str, Any]:
        """Return the state for people and scripts; JSON-able."""
        state = self.state
        return {
            "state": "running" if self.running else "paused" if state.after else "idle",
            "position": round(self.position, 4),
            "pass_began_ns": state.began_ns,
            "checked_chunks": state.chunks,
            "checked_bytes": state.payload_bytes,
            "damage_found": state.damaged,
            "passes": state.passes,
            "last_pass": {
                "began_ns": state.last_began_ns,
                "ended_ns": state.last_ended_ns,
                "chunks": state.last_chunks,
                "checked_bytes": state.last_payload_bytes,
                "damage_found": state.last_damaged,
            },
            "rate_bytes_per_s": self.rate_bytes_per_s,
            "quarantined_chunks": len(self._quarantine),
            "since_start": asdict(self.totals),
        }

    def figures(self) -> dict[str, float]:
        """Return what metrics say of scrub and quarantine."""
        return {
            "running": float(self.running),
            "position": self.position,
            "bytes": self.totals.payload_bytes,
            "chunks": self.totals.chunks,
            "damage": self.totals.damaged,
            "last_pass_s": self.state.last_ended_ns / 1e9,
            "quarantined": len(self._quarantine),
        }

    def due_in_s(self, interval_s: float, created_ns: int) -> float:
        """Return the seconds until a pass is to begin or continue: 0 if one is under way.

        Also 0 if the last pass ended in the future, by today's clock: then its age is unknown.
        """
        since, now = max(self.state.last_ended_ns, created_ns), self._clock.wall_ns()
        if self.state.after or since > now:
            return 0.0
        return max(0.0, interval_s - (now - since) / 1e9)

    # --- reading -------------------------------------------------------------------------------------

    async def advance(self, for_s: float, *, rate_bytes_per_s: int | None = None, restart: bool = False) -> bool:
        """Continue the pass, or begin one, for about `for_s` seconds; returns True if it has ended.

        Tasks that call this at once take turns, a page each, each at its own rate.  Returns earlier when the pass ends
        or another task waits; at most a page later.  Raises IndexDamaged.  A cancelled call leaves the pass at its last
        page.
        """
        until = self._clock.monotonic() + for_s
        passes = self.state.passes
        with trio.move_on_after(for_s) as waiting:
            await self._lock.acquire()
        if waiting.cancelled_caught:
            return self.state.passes > passes
        try:
            if self.state.passes > passes:
                return True
            if restart or not self.state.after:
                self._begin()
            rate = self.rate_bytes_per_s if rate_bytes_per_s is None else rate_bytes_per_s
            while self._clock.monotonic() < until:
                if not await self._page(rate):
                    await self._end()
                    return True
                await self._save_now_and_then()
                if self._lock.statistics().tasks_waiting:
                    return False
            return False
        finally:
            self._lock.release()

    async def save(self) -> None:
        """Commit the position of the pass if it has changed since the last commit; durable on return."""
        if self.state == self._saved:
            return
        state = self.state
        value = msgspec.msgpack.encode(state)
        _, sequence = await self._metadata.commit(lambda txn: txn.put(Table.COUNTERS, STATE_KEY, value))
        await self._metadata.wait_durable(sequence)
        reached("scrub.saved")
        self._saved = state

    async def _save_now_and_then(self) -> None:
        if self._clock.monotonic() - self._saved_at >= SAVE_INTERVAL_S:
            await self._try_to_save()

    async def _try_to_save(self) -> None:
        self._saved_at = self._clock.monotonic()
        try:
            await self.save()
        except LakeError as error:
            _log.warning("scrub cannot note where it stands", reason=error.message)

    def _begin(self) -> None:
        self.state = msgspec.structs.replace(
            self.state, after=b"\0", began_ns=self._clock.wall_ns(), chunks=0, payload_bytes=0, damaged=0
        )

    async def _end(self) -> None:
        state = self.state
        assert state.after, "a pass is under way"
        self.totals.passes += 1
        self.state = msgspec.structs.replace(
            state,
            after=b"",
            passes=state.passes + 1,
            last_began_ns=state.began_ns,
            last_ended_ns=self._clock.wall_ns(),
            last_chunks=state.chunks,
            last_payload_bytes=state.payload_bytes,
            last_damaged=state.damaged,
        )
        await self._try_to_save()
        log = _log.error if state.damaged else _log.info
        log("scrub has read everything", chunks=state.chunks, bytes=state.payload_bytes, damaged=state.damaged)

    async def _page(self, rate: int) -> bool:
        """Check the next page; returns False if there is none."""
        page = await self._next_page(min(PAGE_BYTES_MAX, rate or PAGE_BYTES_MAX))
        if not page:
            return False
        damaged = await self._check(page, rate)
        reached("scrub.page-checked")
        last = page[-1]
        assert last[0] > self.state.after, "a pass moves ahead"
        self.state = msgspec.structs.replace(
            self.state,
            after=last[0],
            chunks=self.state.chunks + len(page),
            payload_bytes=self.state.payload_bytes + sum(item.record.stored_bytes for _, item in page),
            damaged=self.state.damaged + damaged,
        )
        return True

    async def _next_page(self, bytes_max: int) -> list[tuple[bytes, Stored]]:
        """Return the records behind the position of the pass, read in steps that leave the loop to other tasks."""
        page: list[tuple[bytes, Stored]] = []
        after, size = self.state.after, 0
        while True:
            with self._metadata.view() as view:
                for key, value in islice(view.scan(Table.CHUNKS, after + b"\0", _END), GC_BATCH):
                    record = unpack_chunk_record(value)
                    page.append((key, Stored(chunk_id_of_key(key), record, shard_of_key(key))))
                    size += record.stored_bytes
                    if size >= bytes_max or len(page) == PAGE_RECORDS_MAX:
                        return page
            if not page or page[-1][0] == after:
                return page
            after = page[-1][0]
            await trio.lowlevel.checkpoint()

    async def _check(self, page: list[tuple[bytes, Stored]], rate: int) -> int:
        """Check the chunks of a page, batch by batch; returns how many are damaged."""
        batches = batches_of(runs_of([item for _, item in page]))
        damaged = 0

        async def work(area: memoryview) -> None:
            nonlocal damaged
            for batch in batches:
                damaged += await self._check_batch(batch, area, rate)

        while len(self._areas) < _UNBOUNDED_AT_ONCE:
            self._areas.append(new_area())
        await run_all(work, self._areas[: 1 if rate else _UNBOUNDED_AT_ONCE])
        return damaged

    async def _check_batch(self, batch: list[list[Stored]], area: memoryview, rate: int) -> int:
        size = sum(map(bytes_of, batch))
        await self._pacing(size, rate)
        mismatches = await self._segments.medium.check(batch, area)
        damaged = 0
        suspects = {mismatch.stored for mismatch in mismatches}
        for mismatch in mismatches:
            damaged += await self._is_damaged(mismatch, area)
        for item in chain.from_iterable(batch) if self._quarantine else ():
            if self._quarantine.has(item.chunk, item.shard) and item not in suspects:
                self.totals.released += await self._quarantine.release(item.chunk, item.record, item.shard)
        self.totals.chunks += sum(map(len, batch))
        self.totals.payload_bytes += size
        self.totals.damaged += damaged
        return damaged

    async def _is_damaged(self, mismatch: Mismatch, area: memoryview) -> bool:
        """Check one chunk again, and quarantine it if it is damaged; returns True if so."""
        stored = mismatch.stored
        again = await self._segments.medium.check([[stored]], area)
        if not again:
            return False
        with self._metadata.view() as view:
            if find_shard(view, stored.chunk, stored.shard) != stored.record:
                return False
        error = await self._chunks.judged(stored.chunk, stored.record, again[0].error, stored.shard)
        return not isinstance(error, StaleGrant)

    async def _pacing(self, size: int, rate: int) -> None:
        """Wait until that many bytes may be read."""
        if not rate:
            await trio.lowlevel.checkpoint()
            return
        now = self._clock.monotonic()
        begins = max(self._next_at, now)
        self._next_at = begins + size / rate
        await trio.sleep(begins - now)


def _load(metadata: Metadata) -> ScrubRecord:
    with metadata.view() as view:
        value = view.get(Table.COUNTERS, STATE_KEY)
    if value is None:
        return ScrubRecord()
    try:
        return msgspec.msgpack.decode(value, type=ScrubRecord)
    except msgspec.DecodeError:
        return ScrubRecord()  # written by a later release: a pass begins anew
