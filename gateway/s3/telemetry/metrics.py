"""Counts of S3 traffic as Prometheus metrics.

At most operations x 5 series of requests, and a histogram for each operation that was requested: some 700 in all,
however many clients, buckets and keys there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.s3.telemetry.traffic import BOUNDS_S, CLASSES, OPERATIONS, Connections, Snapshot

_SUMS = (
    ("lake_s3_received_bytes", "Bytes of requests' bodies", "bytes_in"),
    ("lake_s3_sent_bytes", "Bytes of answers' bodies", "bytes_out"),
    ("lake_s3_cut_short", "Answers whose body ended early: the client went, or content could not be read", "cut_short"),
    ("lake_s3_connections_turned_away", "Connections for which there was no room", "turned_away"),
    ("lake_s3_connections_timed_out", "Connections that were ended for being idle or slow", "timed_out"),
    ("lake_s3_access_log_lost", "Lines of the access log that could not be written", "log_lost"),
)


class TrafficCollector(Collector):
    """Reads a snapshot for each scrape."""

    def __init__(self, read: Callable[[], tuple[Snapshot, Connections]]) -> None:
        self._read = read

    def describe(self) -> Iterator[Metric]:
        """Yield the families without values, so that registering reads nothing."""
        yield from _families(Snapshot(), Connections())

    def collect(self) -> Iterator[Metric]:
        """Yield the families with present values."""
        yield from _families(*self._read())


def _families(counts: Snapshot, connections: Connections) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "lake_s3_requests", "Requests by operation and class of status", labels=["operation", "status"]
    )
    for at, count in enumerate(counts.requests):
        if count:
            operation, status = divmod(at, len(CLASSES))
            requests.add_metric([OPERATIONS[operation], CLASSES[status]], count)
    yield requests
    errors = CounterMetricFamily("lake_s3_refusals", "Refused requests by S3's error code", labels=["code"])
    for code, count in sorted(counts.errors.items()):
        errors.add_metric([code], count)
    yield errors
    yield _histogram(counts)
    for name, documentation, field in _SUMS:
        yield CounterMetricFamily(name, documentation, value=getattr(counts, field))
    gauge = GaugeMetricFamily("lake_s3_connections", "Connections by state", labels=["state"])
    for state, count in (("idle", connections.idle), ("answering", connections.in_flight)):
        gauge.add_metric([state], count)
    yield gauge


def _histogram(counts: Snapshot) -> HistogramMetricFamily:
    family = HistogramMetricFamily(
        "lake_s3_request_seconds", "From a request's head to the end of its answer", labels=["operation"]
    )
    width = len(BOUNDS_S) + 1
    for number, operation in enumerate(OPERATIONS):
        buckets = counts.times[number * width : (number + 1) * width]
        if not any(buckets):
            continue
        below, cumulative = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), buckets, strict=True):
            below += count
            cumulative.append((bound, below))
        family.add_metric([operation], buckets=cumulative, sum_value=counts.seconds[number])
    return family
