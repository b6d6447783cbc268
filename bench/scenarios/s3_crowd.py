"""The effect of slow or stalled clients on others: 8 busy connections alone, and beside 500 idle and 20 stalled.

Both are measured in turn on one server.  The idle ones have been answered once, and keep their connection.  Of the
stalled ones a third has sent half a head, a third half of a body, a third reads nothing of the 64 MiB it asked for.
They are opened again before each timed round, so that none reaches its time-out.
"""

from __future__ import annotations

import socket
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import cycle, islice
from typing import Any, Final

from bench.harness.content import window
from bench.harness.measure import Bench, Row, Scenario, at_most, spread_of
from bench.harness.s3_contest import CONNECTIONS, Figures, figures_of, told
from bench.harness.s3_load import Load, allow_descriptors
from bench.harness.s3_requests import BUCKET, UNSIGNED, Request, Signer
from bench.peers.s3_sides import Server, ours

IDLE: Final = 500
STALLED: Final = 20
REQUESTS: Final = 6000
HOT_KEYS: Final = 100
LARGE: Final = 64 << 20
SMALL: Final = 4096
LATER: Final = at_most(1.1, "x")


@contextmanager
def idle(server: Server, count: int) -> Iterator[None]:
    """Context manager: connections that were answered once."""
    with Load(server.endpoint, count) as load:
        request = Signer(server.endpoint).request("GET", f"/{BUCKET}/hot/0", answer_bytes=SMALL)
        load.run([request] * count)
        yield


@contextmanager
def stalled(server: Server, count: int) -> Iterator[None]:
    """Context manager: connections that stop in the middle of a request or an answer."""
    signer = Signer(server.endpoint)
    half = signer.request("PUT", f"/{BUCKET}/never", body=window(LARGE), payload_hash=UNSIGNED)
    large = signer.request("GET", f"/{BUCKET}/large")
    ways: Sequence[bytes] = (half.head[: len(half.head) // 2], half.head + b"x" * 100_000, large.head)
    with ExitStack() as stack:
        for beginning in islice(cycle(ways), count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.endpoint.port)))
            sock.sendall(beginning)
        yield


class Crowd:
    """The scenario: busy connections beside a crowd, and alone."""

    name = "s3-crowd"

    def run(self, bench: Bench) -> tuple[list[Row], dict[str, Any]]:
        """Run it; return two rows: p99 and CPU per operation, beside the crowd / alone."""
        idle_count, stalled_count = bench.scale.pick(IDLE, 20), bench.scale.pick(STALLED, 3)
        allow_descriptors(4 * idle_count)
        alone: list[Figures] = []
        beside: list[Figures] = []
        with ours(bench.folder / "ours") as server, Load(server.endpoint, CONNECTIONS) as load:
            for number in range(HOT_KEYS):
                server.put(f"hot/{number}", bytes(window(SMALL)))
            server.put("large", bytes(window(LARGE)))
            run = self._busy(server, load, bench.scale.pick(REQUESTS, 100))
            run()
            for _ in range(bench.scale.rounds):
                alone.append(run())
                with idle(server, idle_count), stalled(server, stalled_count):
                    beside.append(run())
        what = f"S3 GET of 4 KiB beside {idle_count} idle and {stalled_count} stalled connections / alone"
        return self._rows(what, alone, beside), {
            "alone": [vars(found) for found in alone],
            "beside": [vars(found) for found in beside],
        }

    def _busy(self, server: Server, load: Load, count: int) -> Callable[[], Figures]:
        def run() -> Figures:
            signer = Signer(server.endpoint)
            requests: list[Request] = [
                signer.request("GET", f"/{BUCKET}/hot/{number}", answer_bytes=SMALL) for number in range(HOT_KEYS)
            ]
            before = server.cpu_s()
            outcome = load.run(islice(cycle(requests), count))
            return figures_of(outcome, server.cpu_s() - before)

        return run

    def _rows(self, what: str, alone: Sequence[Figures], beside: Sequence[Figures]) -> list[Row]:
        detail = f"{told('beside', beside)} against {told('alone', alone)}"
        p99 = [a.p99_ms / b.p99_ms for a, b in zip(beside, alone, strict=True)]
        cpu = [a.cpu_us / b.cpu_us for a, b in zip(beside, alone, strict=True)]
        return [
            Row(
                self.name, f"{what}, {figure}", statistics.median(ratios), "x", LATER.text,
                LATER.met(statistics.median(ratios)), spread_of(ratios), detail,
            )
            for figure, ratios in (("p99", p99), ("server CPU", cpu))
        ]  # fmt: skip


SCENARIOS: Final[tuple[Scenario, ...]] = (Crowd(),)
