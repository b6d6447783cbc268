"""Metrics read at scrape time."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gateway.admin.metrics import Reading, Readings, new_registry


def _samples(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_reading_is_read_at_each_scrape_and_not_before() -> None:
    reads: list[float] = []

    def read() -> float:
        reads.append(len(reads) + 1.0)
        return reads[-1]

    registry = CollectorRegistry()
    registry.register(Readings([Reading("lake_chunks", "Chunks.", read)]))
    assert reads == []
    assert _samples(registry)["lake_chunks", ""] == 1.0
    assert _samples(registry)["lake_chunks", ""] == 2.0


def test_labelled_counters_keep_their_labels_and_their_name() -> None:
    registry = new_registry(
        ("1.2.3", "c0ffee"), [Reading("lake_requests_total", "Requests.", lambda: {"put": 3, "get": 4.5}, label="op")]
    )
    samples = _samples(registry)
    assert samples["lake_requests_total", "put"] == 3
    assert samples["lake_requests_total", "get"] == 4.5
    assert registry.get_sample_value("lake_build_info", {"version": "1.2.3", "commit": "c0ffee"}) == 1
    assert samples["lake_start_time_seconds", ""] > 0
    assert samples["process_resident_memory_bytes", ""] > 0


def test_two_readings_of_one_name_are_refused() -> None:
    registry = CollectorRegistry()
    registry.register(Readings([Reading("lake_chunks", "Chunks.", lambda: 1)]))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(Readings([Reading("lake_chunks", "Chunks.", lambda: 1)]))


@pytest.mark.parametrize("name", ["chunks", "chunks_total", "lake_Chunks", "lake_"])
def test_a_name_against_the_conventions_is_a_bug(name: str) -> None:
    with pytest.raises(AssertionError):
        Reading(name, "X.", lambda: 1)


def test_what_ends_in_total_is_a_counter_and_all_else_a_gauge() -> None:
    registry = CollectorRegistry()
    registry.register(Readings([Reading("lake_x_total", "X.", lambda: 1), Reading("lake_x", "X.", lambda: 1)]))
    text = generate_latest(registry).decode()
    assert "# TYPE lake_x_total counter" in text
    assert "# TYPE lake_x gauge" in text
