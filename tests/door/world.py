"""An engine with two gateways, one with the door and one without: the same bytes to both must have the same answer.

The gateway without a door is the oracle.  `program` may put another `lake` in the place of the one with the door: the
tests do so to show that a difference is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from tests.crash.small_engine import SmallEngine
from tests.door.asks import DOMAIN, Ask, Key, raw_of
from tests.door.line import Line, Reply, address_of, without_own
from tests.door.stored import OPEN, OTHER, store_all
from tests.e2e.gateways import Gateway, gateway
from tests.e2e.s3_client import url_of
from tests.e2e.served import LAKE, Served, serving

SETTINGS: Final = ("--s3-domains", DOMAIN, "--log-level", "error")
"""Options of all gateways."""
_SERIES: Final = re.compile(r"(\w+)(?:\{([^}]*)\})? ([0-9.e+-]+)")


def door(state: str) -> list[str]:
    """Return the options that turn the door `on` or `off`."""
    return ["--s3-door", state]


def figure(found: Gateway, name: str, labels: str = "") -> float:
    """Return a figure of a gateway's metrics: the sum of all series of that name whose labels contain `labels`."""
    series = (_SERIES.fullmatch(line) for line in found.admin("/metrics")[1].splitlines())
    return sum(float(one[3]) for one in series if one and one[1] == name and labels in (one[2] or ""))


def repeated(found: Gateway) -> float:
    """Return the number of answers that the door of a gateway gave."""
    return figure(found, "lake_s3_repeated_total")


def gathered(found: Gateway) -> float:
    """Return the number of PUTs that the door of a gateway has had stored."""
    return figure(found, "lake_s3_repeated_total", 'operation="PutObject"')


def new_key(lake: Lake, *, buckets: Sequence[str] = (), read_only: bool = False) -> Key:
    """Make an access key."""
    made = lake.create_access_key(buckets=buckets, read_only=read_only)
    return Key(made.access_key, made.secret_key)


class World:
    """The engine, both gateways, the keys by name, and the ids of versions by name."""

    def __init__(self, engine: Served, with_door: Gateway, without: Gateway, keys: dict[str, Key], lake: Lake) -> None:
        self.engine = engine
        self.with_door = with_door
        self.without = without
        self.keys = keys
        self.lake = lake
        self.versions: dict[str, str] = {}
        self.door_address = address_of(with_door.url)
        self.plain_address = address_of(without.url)
        self.sent = 0
        """Requests that were sent to the gateway with the door."""

    @contextmanager
    def beside(self, program: Sequence[str], state: str = "off") -> Iterator[World]:
        """Run another gateway, which has a planted bug, in the place of the one with the door; its own is `state`."""
        with gateway(self.engine.server, *SETTINGS, *door(state), program=program) as other:
            yield self._with(other, other.url)

    def by_engine(self) -> World:
        """Return the same with the engine's own S3 port in the place of the gateway with the door."""
        return self._with(self.with_door, url_of(self.engine))

    def _with(self, other: Gateway, url: str) -> World:
        found = World(self.engine, other, self.without, self.keys, self.lake)
        found.versions, found.door_address = self.versions, address_of(url)
        return found

    def raw(self, ask: Ask) -> bytes:
        """Return the bytes of a request, signed now."""
        return raw_of(ask, self.keys, self.versions)

    def send(self, raw: bytes) -> Reply:
        """Send a request to the gateway without a door, on a connection of its own."""
        with Line(self.plain_address) as line:
            return line.ask(raw)

    def do(self, ask: Ask) -> Reply:
        """Sign and send a request to the gateway without a door."""
        return self.send(self.raw(ask))

    def exchange(self, address: tuple[str, int], requests: Sequence[bytes]) -> list[bytes]:
        """Send requests one after the other, and return the answers and what comes behind them, masked.

        On one connection as long as the server keeps it.
        """
        found: list[bytes] = []
        self.sent += len(requests) if address == self.door_address else 0
        with ExitStack() as stack:
            line: Line | None = None
            for raw in requests:
                line = line or stack.enter_context(Line(address))
                reply = line.ask(raw)
                found.append(reply.masked())
                if reply.is_last:
                    line = None
            if line is not None:
                line.end_sending()
                found.append(without_own(line.rest()))
        return found

    def agree(self, requests: Sequence[bytes]) -> list[bytes]:
        """Send the same requests to both gateways; return the answers, which must be equal."""
        expected = self.exchange(self.plain_address, requests)
        given = self.exchange(self.door_address, requests)
        for number, (one, other) in enumerate(zip(expected, given, strict=False)):
            if one != other:
                raise AssertionError(difference(requests[min(number, len(requests) - 1)], number, one, other))
        assert len(expected) == len(given), (requests, expected[-1][:300], given[-1][:300])
        return given


def difference(raw: bytes, number: int, expected: bytes, given: bytes) -> str:
    """Return text that shows a request, and where its answers begin to differ."""
    at = next((at for at, (a, b) in enumerate(zip(expected, given, strict=False)) if a != b), -1)
    at = at if at >= 0 else min(len(expected), len(given))
    return (
        f"answer {number} to {raw!r}\n  without the door: {expected[:600]!r}\n  with the door:    {given[:600]!r}\n"
        f"  they differ from byte {at} on: {expected[at : at + 60]!r}, {given[at : at + 60]!r}; "
        f"lengths {len(expected)}, {len(given)}"
    )


@contextmanager
def world(*options: str, program: Sequence[str] = tuple(LAKE), engine_program: Sequence[str] = ()) -> Iterator[World]:
    """Run an engine and both gateways, with all objects stored.

    `options` are the engine's, and `engine_program` the command that it is; `program` is that of the gateway with the
    door.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="lake-")))
        engine = stack.enter_context(_engine(folder, options, engine_program))
        lake = stack.enter_context(connect(engine.server))
        keys = {
            "owner": new_key(lake),
            "reader": new_key(lake, read_only=True),
            "other": new_key(lake, buckets=[OTHER]),
            "gone": new_key(lake),
        }
        lake.remove_access_key(keys["gone"].access_key)
        without = stack.enter_context(gateway(engine.server, *SETTINGS, *door("off")))
        with_door = stack.enter_context(gateway(engine.server, *SETTINGS, *door("on"), program=program))
        found = World(engine, with_door, without, keys, lake)
        found.versions = store_all(found.send, keys)
        lake.set_bucket(OPEN, anonymous_read=True)
        yield found


@contextmanager
def _engine(folder: Path, options: Sequence[str], program: Sequence[str]) -> Iterator[Served]:
    if not program:
        with serving(folder, *options) as served:
            yield served
        return
    engine = SmallEngine(folder, *options, started=False)
    engine.program = list(program)
    engine.start()
    try:
        yield engine
    finally:
        code = engine.stop()
    assert code == 0
