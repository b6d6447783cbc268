"""Metrics of an engine for the admin port's `/metrics`.  All are read from memory; nothing blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

from engine.process.engine_process import RunningEngine
from engine.store.store import Store
from engine.tiers.dram_filler import Dram
from gateway.admin.metrics import Reading


def readings(engine: RunningEngine) -> list[Reading]:
    """Return the metrics of the store."""
    store = engine.store
    small_reads = store.segments.batches.statistics

    def metadata(name: str) -> Callable[[], float]:
        return lambda: float(store.metadata.stats()[name])

    return [
        Reading("lake_ready", "1 when the engine serves", lambda: engine.not_ready() is None),
        Reading("lake_connections", "Open connections", lambda: engine.server.connection_count),
        Reading("lake_holds", "Sessions and leases", lambda: store.references.statistics(), "kind"),
        Reading("lake_segments", "Segment files", lambda: len(store.segments.register.kinds)),
        Reading(
            "lake_healed_reads_total",
            "Reads that matched their checksums only past the page cache",
            lambda: store.segments.reader.healed_reads,
        ),
        Reading(
            "lake_small_reads_total",
            "Small payloads and ranges read: cached, by the queue (io_uring or threads), or alone in threads",
            lambda: {way: float(small_reads()[way]) for way in ("cached", "queue", "threads")},
            "way",
        ),
        Reading(
            "lake_io_uring", "1 when the disk is read through io_uring", lambda: small_reads()["through"] == "io_uring"
        ),
        *gc_readings(store),
        *keyed_readings(store),
        *scrub_readings(lambda figure: store.scrubber.figures()[figure]),
        *shared_index_readings(lambda: None if store.shared_index is None else store.shared_index.statistics()),
        *dram_readings(lambda: store.dram),
        Reading("lake_overlay_entries", "Entries not yet in the index", metadata("overlay_entries")),
        Reading("lake_journal_bytes", "Journal since the last checkpoint", metadata("journal_bytes_since_checkpoint")),
        Reading("lake_durable_sequence", "Last durable journal group", metadata("durable_sequence")),
        Reading("lake_buffers_in_use", "Payload buffers in use", lambda: store.buffers.in_use),
        Reading("lake_reserve_bytes", "Room held for journal and index", lambda: store.reserve.held_bytes),
    ]


def shared_index_readings(statistics: Callable[[], dict[str, Any] | None]) -> list[Reading]:
    """Return the metrics of the shared index; zeros if there is none."""

    def statistic(name: str) -> float:
        return float((statistics() or {}).get(name, 0))

    return [
        Reading("lake_hot_index_entries", "Chunks in the shared index", lambda: statistic("entries")),
        Reading("lake_hot_index_entries_max", "Chunks it has room for", lambda: statistic("entries_max")),
        Reading("lake_hot_index_bytes", "Memory of the shared index", lambda: statistic("bytes")),
        Reading(
            "lake_hot_index_in_slabs", "Chunks that it tells to be in the DRAM tier", lambda: statistic("in_slabs")
        ),
        Reading(
            "lake_hot_index_refused_total", "Chunks that the shared index had no room for", lambda: statistic("refused")
        ),
        Reading(
            "lake_hot_index_looked_up_total",
            "Chunks that the engine looked up in it for clients",
            lambda: {"found": statistic("found"), "missed": statistic("missed")},
            "outcome",
        ),
    ]


def gc_readings(store: Store) -> list[Reading]:
    """Return the metrics of gc and compaction, since the start of this process."""
    totals = store.collected
    return [
        Reading(
            "lake_pinned",
            "What clients that read through mappings keep in its place",
            lambda: store.segments.pins.statistics(),
            "kind",
        ),
        Reading(
            "lake_lent_memory_bytes", "Memory that clients lend to the engine", lambda: store.lent.statistics()["bytes"]
        ),
        Reading("lake_gc_running", "1 while gc or compaction work", lambda: store.is_collecting),
        Reading("lake_gc_cycles_total", "Cycles that ended", lambda: totals.cycles),
        Reading("lake_gc_freed_bytes_total", "Payload bytes that gc freed", lambda: totals.freed_bytes),
        Reading("lake_compaction_moved_bytes_total", "Payload bytes that compaction moved", lambda: totals.moved_bytes),
        Reading(
            "lake_gc_last_cycle_timestamp_seconds",
            "When the last cycle ended, in seconds since 1970; 0: never",
            lambda: totals.last_ended_ns / 1e9,
        ),
    ]


def keyed_readings(store: Store) -> list[Reading]:
    """Return the metrics of keyed blobs, and of the table of their keys; zeros if there is none."""
    keyed = store.keyed

    def of_index(name: str) -> float:
        return float(store.keyed_index.statistics()[name]) if store.keyed_index is not None else 0.0

    def outcomes() -> dict[str, float]:
        counts = asdict(keyed.counts)
        return {name: count for name, count in counts.items() if not name.endswith("_bytes")}

    return [
        Reading("lake_keyed_spaces", "Spaces of keyed blobs", lambda: keyed.statistics()["spaces"]),
        Reading("lake_keyed_values", "Values of keys", lambda: keyed.statistics()["entries"]),
        Reading("lake_keyed_bytes", "Bytes of the values of keys", lambda: keyed.statistics()["value_bytes"]),
        Reading("lake_keyed_index_entries", "Keys and spaces in the keyed index", lambda: of_index("entries")),
        Reading("lake_keyed_index_bytes", "Memory of the keyed index", lambda: of_index("bytes")),
        Reading(
            "lake_keyed_index_refused_total", "Keys that the keyed index had no room for", lambda: of_index("refused")
        ),
        Reading(
            "lake_keyed_index_corrected_total", "Entries that requests have set right", lambda: of_index("corrected")
        ),
        Reading("lake_keyed_keys_total", "Keys by what became of them", outcomes, "outcome"),
        Reading("lake_keyed_stored_bytes_total", "Bytes of values stored", lambda: keyed.counts.stored_bytes),
        Reading("lake_keyed_loaded_bytes_total", "Bytes of values loaded", lambda: keyed.counts.loaded_bytes),
        Reading("lake_keyed_evicted_bytes_total", "Bytes of values evicted", lambda: keyed.counts.evicted_bytes),
    ]


def scrub_readings(read: Callable[[str], float | Mapping[str, float]], label: str = "") -> list[Reading]:
    """Return the metrics of scrub and quarantine; `read` returns one of `Scrubber.figures`, with `label` those of all.

    A lake has those of each member on its machine.
    """
    return [
        Reading(name, documentation, partial(read, figure), label)
        for name, figure, documentation in (
            ("lake_scrub_running", "running", "1 while scrub reads"),
            ("lake_scrub_position", "position", "Share of the pass that is done, 0 to 1"),
            ("lake_scrub_bytes_total", "bytes", "Payload bytes that scrub has checked"),
            ("lake_scrub_chunks_total", "chunks", "Chunks that scrub has checked"),
            ("lake_scrub_damage_total", "damage", "Chunks that scrub found damaged"),
            (
                "lake_scrub_last_pass_timestamp_seconds",
                "last_pass_s",
                "When the last full pass ended, in seconds since 1970; 0: never",
            ),
            ("lake_quarantined_chunks", "quarantined", "Chunks known to be damaged"),
        )
    ]


def dram_readings(dram: Callable[[], Dram]) -> list[Reading]:
    """Return the metrics of the DRAM tier; zeros if there is none."""

    def figure(name: str) -> Callable[[], float]:
        return lambda: float(dram().statistics().get(name, 0))

    return [
        Reading("lake_dram_limit_bytes", "Memory that the DRAM tier may take", figure("limit_bytes")),
        Reading("lake_dram_memory_bytes", "Memory of the DRAM tier's slabs", figure("memory_bytes")),
        Reading("lake_dram_payload_bytes", "Payload in the DRAM tier", figure("payload_bytes")),
        Reading("lake_dram_pinned_bytes", "Memory that readers have pinned", figure("pinned_bytes")),
        Reading("lake_dram_chunks", "Chunks in the DRAM tier", figure("chunks")),
        Reading("lake_dram_hits_total", "Chunks that were found there", figure("hits")),
        Reading("lake_dram_misses_total", "Chunks that were not", figure("misses")),
        Reading("lake_dram_filled_bytes_total", "Payload bytes brought in", figure("filled_bytes")),
        Reading("lake_dram_demotions_total", "Chunks that went for others", figure("demotions")),
        Reading(
            "lake_dram_client_reads_total",
            "Reads that clients did by themselves and told of, a sample",
            lambda: {"hit": figure("client_hits")(), "miss": figure("client_reads")() - figure("client_hits")()},
            "outcome",
        ),
    ]
