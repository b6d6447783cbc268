"""Metrics: a registry whose values are read when it is scraped.

The owner of a figure passes a `Reading`: a name, a sentence, and a callable.  Nothing is counted twice, nothing is
kept up to date between scrapes, and the gateway needs to know nothing about the owners.

Rules kept here:
- Names follow Prometheus' conventions: `lake_` first, base units last (`_bytes`, `_seconds`), `_total` on counters.
- `read` runs on the loop at each scrape: it must not block.  Labels are few and their values bounded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_NAME: Final = re.compile(r"lake_[a-z][a-z0-9_]*")
Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True)
class Reading:
    """One metric.  `read` returns its value, or with `label` the value of each label value.

    One whose name ends in `_total` is a counter: it only ever grows while the process lives.  Any other is a gauge.
    """

    name: str
    documentation: str
    read: Callable[[], float | Mapping[str, float]]
    label: str = ""

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"metric {self.name!r}: names begin with lake_"


class Readings(Collector):
    """The collector of a fixed set of readings."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = tuple(readings)

    def describe(self) -> Iterator[Family]:
        """Yield the families without values, so that registering reads nothing."""
        for reading in self._readings:
            yield _family(reading)

    def collect(self) -> Iterator[Family]:
        """Yield the families with present values."""
        for reading in self._readings:
            family = _family(reading)
            value = reading.read()
            if isinstance(value, Mapping):
                for label_value, labelled in value.items():
                    family.add_metric([label_value], labelled)
            else:
                family.add_metric([], value)
            yield family


class _Build(Collector):
    """The metric that names what runs."""

    def __init__(self, version: str, commit: str) -> None:
        self._family = GaugeMetricFamily(
            "lake_build_info", "1, labelled with version and commit.", labels=["version", "commit"]
        )
        self._family.add_metric([version, commit], 1.0)

    def collect(self) -> Iterator[Family]:
        yield self._family


def new_registry(
    build: tuple[str, str], readings: Iterable[Reading] = (), collectors: Iterable[Collector] = ()
) -> CollectorRegistry:
    """Return a registry with the readings, other collectors, figures of the process, its build and its start.

    `build`: version and commit.
    """
    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    started = time.time()
    start = Reading("lake_start_time_seconds", "When the process started, in seconds since 1970.", lambda: started)
    registry.register(_Build(*build))
    registry.register(Readings([start, *readings]))
    for collector in collectors:
        registry.register(collector)
    return registry


def _family(reading: Reading) -> Family:
    kind = CounterMetricFamily if reading.name.endswith("_total") else GaugeMetricFamily
    return kind(reading.name, reading.documentation, labels=[reading.label] if reading.label else [])
