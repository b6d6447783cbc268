"""Counts of the traffic of an S3 port: cheap to keep, returned on request.

Rules kept here:
- One call for each answered request; it adds to plain integers and touches nothing that grows with clients' input.
  Labels are from fixed sets: operations, status classes, error codes.
- A `Snapshot` can be added to another, so that processes behind one port count as one.
- For Prometheus: at most operations x 6 series of requests, and a histogram for each operation that was requested: some
  2,600 in all, however many clients, buckets and keys there are; a tool that asks for all of them makes most of these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Final

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.http.messages import Request, Response
from gateway.http.server import HttpServer
from gateway.s3.protocol.operation import Operation
from gateway.s3.protocol.targets import Target

OPERATIONS: Final = (*(operation.value for operation in Operation), "none")
"""`none`: a request that was refused before its operation was known."""
CLASSES: Final = ("1xx", "2xx", "3xx", "4xx", "5xx", "501")
"""Classes of status.  501 is one of its own: a client asked for what is not offered, and the server has no fault."""
_NOT_IMPLEMENTED: Final = 501
BOUNDS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
NUMBERS: Final = {name: number for number, name in enumerate(OPERATIONS)}
_NONE: Final = len(OPERATIONS) - 1
_BUCKETS: Final = len(BOUNDS_S) + 1
_CODES_MAX: Final = 128
"""Error codes are from a fixed set that is smaller; a bound all the same."""
_SUMS = (
    ("lake_s3_received_bytes", "Bytes of requests' bodies", "bytes_in"),
    ("lake_s3_sent_bytes", "Bytes of answers' bodies", "bytes_out"),
    ("lake_s3_cut_short", "Answers whose body ended early: the client went, or content could not be read", "cut_short"),
    ("lake_s3_connections_turned_away", "Connections for which there was no room", "turned_away"),
    ("lake_s3_connections_timed_out", "Connections that were ended for being idle or slow", "timed_out"),
    ("lake_s3_access_log_lost", "Lines of the access log that could not be written", "log_lost"),
)

Observer = Callable[[Request, Response, float, float, int, int, bool], None]
"""Called for each request, for the log; see `Traffic.answered` and `AccessLog.answered` for the arguments."""


class Snapshot(msgspec.Struct):
    """Sums since a process began; lists are ordered by operation, and within it by status class or time bucket."""

    requests: list[int] = msgspec.field(default_factory=lambda: [0] * (len(OPERATIONS) * len(CLASSES)))
    times: list[int] = msgspec.field(default_factory=lambda: [0] * (len(OPERATIONS) * _BUCKETS))
    seconds: list[float] = msgspec.field(default_factory=lambda: [0.0] * len(OPERATIONS))
    bytes_in: int = 0
    bytes_out: int = 0
    cut_short: int = 0
    errors: dict[str, int] = msgspec.field(default_factory=dict)
    turned_away: int = 0
    timed_out: int = 0
    log_lost: int = 0
    repeated: dict[str, int] = msgspec.field(default_factory=dict)
    """Answers of the door by operation; they are among `requests`."""
    passed_on: dict[str, int] = msgspec.field(default_factory=dict)
    """Requests that the door left to Python, by reason."""

    def plus(self, other: Snapshot) -> Snapshot:
        """Return the sum of both."""
        return Snapshot(
            [a + b for a, b in zip(self.requests, other.requests, strict=True)],
            [a + b for a, b in zip(self.times, other.times, strict=True)],
            [a + b for a, b in zip(self.seconds, other.seconds, strict=True)],
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
            self.cut_short + other.cut_short,
            _sum(self.errors, other.errors),
            self.turned_away + other.turned_away,
            self.timed_out + other.timed_out,
            self.log_lost + other.log_lost,
            _sum(self.repeated, other.repeated),
            _sum(self.passed_on, other.passed_on),
        )


def _class_of(status: int) -> int:
    """Return the place of a status among CLASSES."""
    return len(CLASSES) - 1 if status == _NOT_IMPLEMENTED else status // 100 - 1


def _sum(left: dict[str, int], right: dict[str, int]) -> dict[str, int]:
    return {name: left.get(name, 0) + right.get(name, 0) for name in left | right}


class Connections(msgspec.Struct, frozen=True):
    """Present connections: all open, those without a request, and those being answered."""

    open: int = 0
    idle: int = 0
    in_flight: int = 0

    def plus(self, other: Connections) -> Connections:
        """Return the sum of both."""
        return Connections(self.open + other.open, self.idle + other.idle, self.in_flight + other.in_flight)


class Traffic:
    """The counts of one process."""

    def __init__(self, observer: Observer | None = None) -> None:
        """`observer` is also called for every request: the access log."""
        self._counts = Snapshot()
        self._observer = observer

    def answered(
        self, request: Request, response: Response, began: float, first: float, received: int, sent: int
    ) -> None:
        """Count a request that was answered or broken off: times of `perf_counter`, bytes of the bodies.

        `first` is the time of the answer's first bytes, 0.0 for now; `sent` is -1 for all of `response.parts`.
        """
        now = perf_counter()
        counts = self._counts
        target = request.target
        number = NUMBERS[target.operation._value_] if isinstance(target, Target) else _NONE
        if sent < 0:
            sent = sum(map(len, response.parts))
        status = response.status
        counts.requests[number * len(CLASSES) + _class_of(status)] += 1
        took = now - began
        counts.times[number * _BUCKETS + bisect_left(BOUNDS_S, took)] += 1
        counts.seconds[number] += took
        counts.bytes_in += received
        counts.bytes_out += sent
        if response.code:
            self._refused(response.code)
        is_cut = response.stream is not None and sent != response.length
        if is_cut:
            counts.cut_short += 1
        if self._observer is not None:
            self._observer(request, response, took, (first or now) - began, received, sent, is_cut)

    def malformed(self, response: Response) -> None:
        """Count the answer to bytes that were no request."""
        self._counts.requests[_NONE * len(CLASSES) + _class_of(response.status)] += 1
        self._refused(response.code)

    def _refused(self, code: str) -> None:
        errors = self._counts.errors
        if code not in errors and len(errors) >= _CODES_MAX:
            code = "other"
        errors[code] = errors.get(code, 0) + 1

    def snapshot(self, server: HttpServer, log_lost: int) -> Snapshot:
        """Return the sums so far, with the counts of the server and the log."""
        counts = self._counts
        counts.turned_away = server.turned_away
        counts.timed_out = server.timed_out
        counts.log_lost = log_lost
        return counts


def connections_of(server: HttpServer) -> Connections:
    """Count the present connections; looks at each one, so call it only now and then."""
    count, idle = server.counts()
    return Connections(count, idle, count - idle)


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
    repeated = CounterMetricFamily(
        "lake_s3_repeated", "Answers that native code gave, by operation", labels=["operation"]
    )
    for operation_name, count in sorted(counts.repeated.items()):
        repeated.add_metric([operation_name], count)
    yield repeated
    passed_on = CounterMetricFamily(
        "lake_s3_passed_on", "Requests that native code left to Python, by reason", labels=["reason"]
    )
    for reason, count in sorted(counts.passed_on.items()):
        passed_on.add_metric([reason], count)
    yield passed_on
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
