"""GET and PUT at 1, 8, 64 and 512 connections: bytes per second, and the time to the last byte.

In each cell of the table every connection sends its next request once the previous answer is complete, for a time;
then the answers in progress are waited for.  Bytes per second are the median of the rounds, percentiles those of all
rounds together.  Every PUT has new content.  The servers are new for each number of connections.

Large objects do not fit into a few seconds.  GETs of them are abandoned after a while: the bytes received count, and
in the percentiles such a GET counts as slower than all answered ones (`> 1600`: more was still in progress).  PUTs of
them run to their end, at least one on each connection, if a round is 4 GiB or less, with two rounds then; 512 at once
are abandoned after a while, and the figure is the bytes that the sockets took (`~`): more than was stored.
"""

from __future__ import annotations

import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, cycle
from typing import Any, Final

from bench.harness.content import window
from bench.harness.measure import Bench, Row, Scenario, at_least, spread_of
from bench.harness.s3_contest import OURS, absent_row, race, servers
from bench.harness.s3_load import Load, Outcome, allow_descriptors
from bench.harness.s3_requests import BUCKET, UNSIGNED, Request, Signer
from bench.peers.s3_sides import Server

CONNECTIONS: Final = (1, 8, 64, 512)
KEYS: Final = 1000
"""Keys that PUTs overwrite, again and again."""
LARGE_MIN: Final = 4
"""Least number of PUTs of large objects in one round."""
GOT_BYTES: Final = 128 << 20
"""Most bytes of all objects that are read, of which there are at most 100: they stay in the page cache."""
AHEAD: Final = at_least(1, "x")
QUICK_S: Final = 0.2
PATIENCE_S: Final = 10.0
"""Time to wait for all answers of a round; GETs of large objects have less."""
WHOLE_BYTES: Final = 4 << 30
"""Most bytes of PUTs of large objects in a round that runs to its end."""
WHOLE_PATIENCE_S: Final = 20.0
SHORT_BYTES: Final = 1 << 30
"""A round with more bytes is run at most twice."""
CUT_S: Final = 3.0
QUICK_BYTES: Final = 4 << 20
SIGNED_AHEAD: Final = 4000
KIB: Final = 1 << 10
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Rates:
    """The cells of one operation and size."""

    name: str
    title: str
    peers: tuple[str, ...]
    size: int
    window_s: float
    put: bool = False
    patience_s: float = PATIENCE_S

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """Run it; return a row for each number of connections and peer; the table has the figures."""
        if bench.scale.quick:
            quick = replace(self, size=min(self.size, QUICK_BYTES), window_s=QUICK_S)
            return quick._cells(bench, CONNECTIONS[:2])
        return self._cells(bench, CONNECTIONS)

    def _cells(self, bench: Bench, counts: Sequence[int]) -> tuple[list[Row], dict[str, Any]]:
        allow_descriptors(8 * max(counts))
        rows: list[Row] = []
        cells: dict[str, Any] = {}
        table = [["connections", *(f"{who}: MiB/s, p50, p99 ms" for who in (OURS, *self.peers))]]
        for connections in counts:
            folder = bench.folder / str(connections)
            folder.mkdir()
            rounds = self._rounds(bench.scale.rounds, connections)
            results, absent = race(self._sides(Bench(folder, bench.scale), connections), rounds)
            shutil.rmtree(folder, ignore_errors=True)
            what = f"{self.title}, {connections} connections, bytes/s"
            rows += [self._row(what, results, peer) for peer in self.peers if peer in results]
            rows += [absent_row(self.name, f"{what} / {peer}", AHEAD, reason) for peer, reason in absent.items()]
            table.append(
                [str(connections)]
                + [self._told(results[who]) if who in results else "-" for who in (OURS, *self.peers)]
            )
            cells[str(connections)] = {who: _recorded(found) for who, found in results.items()}
        return rows, {"unit": "B/s", "cells": cells, "table": {"title": self.title, "lines": table}}

    def _row(self, what: str, results: Mapping[str, Sequence[Outcome]], peer: str) -> Row:
        """Return the row of the rounds in which the peer moved bytes: there is no ratio to 0."""
        rounds = list(zip(results[OURS], results[peer], strict=True))
        ratios = [mine.rate / other.rate for mine, other in rounds if other.rate]
        if not ratios:
            return absent_row(self.name, f"{what} / {peer}", AHEAD, "not a byte arrived in any round")
        ratio = statistics.median(ratios)
        return Row(self.name, f"{what} / {peer}", ratio, "x", AHEAD.text, AHEAD.met(ratio), spread_of(ratios))

    def _sides(
        self, bench: Bench, connections: int
    ) -> dict[str, Callable[[], AbstractContextManager[Callable[[], Outcome]]]]:
        made = servers(bench)
        return {who: partial(self._side, made[who], connections) for who in (OURS, *self.peers)}

    @contextmanager
    def _side(
        self, make: Callable[[], AbstractContextManager[Server]], connections: int
    ) -> Iterator[Callable[[], Outcome]]:
        numbers = count()
        with make() as server:
            keys = self._filled(server)
            with Load(server.endpoint, connections) as load:

                def run() -> Outcome:
                    signer = Signer(server.endpoint)
                    if self.put and self.size > MIB:
                        return self._put_large(load, signer, connections)
                    requests = self._puts(signer, numbers) if self.put else self._gets(signer, keys)
                    return load.run(requests, for_s=self.window_s, give_up_s=self.patience_s)

                run()
                yield run

    def _round_bytes(self, connections: int) -> int:
        """Return the bytes of PUTs of large objects in a round that runs to its end; 0 for other operations."""
        return max(connections, LARGE_MIN) * self.size if self.put and self.size > MIB else 0

    def _rounds(self, rounds: int, connections: int) -> int:
        return min(2, rounds) if self._round_bytes(connections) > SHORT_BYTES else rounds

    def _put_large(self, load: Load, signer: Signer, connections: int) -> Outcome:
        requests = [self._put_one(signer, number) for number in range(max(connections, LARGE_MIN))]
        whole = self._round_bytes(connections) <= WHOLE_BYTES
        return load.run(requests, give_up_s=WHOLE_PATIENCE_S if whole else CUT_S)

    def _filled(self, server: Server) -> list[str]:
        if self.put:
            return []
        keys = [f"get/{number}" for number in range(min(100, GOT_BYTES // self.size))]
        for key in keys:
            server.put(key, bytes(window(self.size)))
        return keys

    def _gets(self, signer: Signer, keys: Sequence[str]) -> Iterator[Request]:
        return cycle([signer.request("GET", f"/{BUCKET}/{key}", answer_bytes=self.size) for key in keys])

    def _puts(self, signer: Signer, numbers: Iterator[int]) -> Iterator[Request]:
        """Yield PUTs: as many as small objects may need are signed before the run, the rest during it."""

        one = partial(self._put_one, signer)
        ahead = [one(next(numbers)) for _ in range(SIGNED_AHEAD)]
        return chain(ahead, map(one, numbers))

    def _put_one(self, signer: Signer, number: int) -> Request:
        path = f"/{BUCKET}/put/{number % KEYS:04}"
        return signer.request("PUT", path, body=window(self.size), payload_hash=UNSIGNED)

    def _told(self, rounds: Sequence[Outcome]) -> str:
        rate = statistics.median(found.rate for found in rounds)
        taken = "~ " if self.put and any(found.unfinished_s for found in rounds) else ""
        return f"{taken}{rate / MIB:.4g}, {_percentile(rounds, 0.5)}, {_percentile(rounds, 0.99)}"


def _percentile(rounds: Sequence[Outcome], share: float) -> str:
    """Format a percentile of all rounds in milliseconds; `> N` if it is only known to be above."""
    every = Outcome(
        latencies_s=[value for found in rounds for value in found.latencies_s],
        unfinished_s=[value for found in rounds for value in found.unfinished_s],
    )
    value_s = every.percentile_s(share)
    if math.isinf(value_s):
        return f"> {max(every.unfinished_s) * 1e3:.0f}"
    return f"{value_s * 1e3:.0f}" if value_s >= 1 else f"{value_s * 1e3:.3g}"


def _recorded(rounds: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "rates": [found.rate for found in rounds],
        "p50_ms": _percentile(rounds, 0.5),
        "p99_ms": _percentile(rounds, 0.99),
        "answered": [found.count for found in rounds],
        "given_up": [len(found.unfinished_s) for found in rounds],
        "generator": [found.own_cpu_s / found.elapsed_s for found in rounds],
    }


_STORES: Final = ("openlaked",)
_READERS: Final = ("openlaked", "nginx")

SCENARIOS: Final[tuple[Scenario, ...]] = (
    Rates("s3-rate-get-4k", "S3 GET of 4 KiB", _READERS, 4 * KIB, 0.5),
    Rates("s3-rate-get-1m", "S3 GET of 1 MiB", _READERS, MIB, 0.5),
    Rates("s3-rate-get-64m", "S3 GET of 64 MiB", _READERS, 64 * MIB, 0.8, patience_s=1.6),
    Rates("s3-rate-put-4k", "S3 PUT of 4 KiB", _STORES, 4 * KIB, 0.5, put=True),
    Rates("s3-rate-put-1m", "S3 PUT of 1 MiB", _STORES, MIB, 0.5, put=True),
    Rates("s3-rate-put-64m", "S3 PUT of 64 MiB", _STORES, 64 * MIB, 0.0, put=True),
)
