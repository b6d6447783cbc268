"""Operators see repeated answers as they see all others: in the metrics and in the access log."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.door.asks import Ask, Flaw, Way
from tests.door.line import Line, address_of
from tests.door.stored import KIB, OPEN, THINGS
from tests.door.warm import HOT, content
from tests.door.world import SETTINGS, World, door, figure, repeated, world
from tests.e2e.gateways import Gateway, gateway
from tests.e2e.test_gateway import until
from tests.served_devices import DEVICES

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
TIMES = 200
COUNTED: Final = re.compile(
    r"(lake_s3_(?:requests|refusals|sent_bytes|received_bytes|cut_short)_total|lake_s3_request_seconds_count)\S* \S+"
)
OWN: Final = ("timestamp", "request_id", "remote", "total_ms", "first_byte_ms")
AGENTS: Final = ("lake-test", "", 'quotes " and \\', "x" * 300, "h\xe9", "tab\tin", "a/1 (b; c) [d]")
ASKS: Final = (
    *(Ask(f"/{THINGS}/{key}", method) for key in HOT for method in ("GET", "HEAD")),
    Ask(f"/{THINGS}/{HOT[0]}", headers=(("range", "bytes=5-99"),)),
    Ask(f"/{THINGS}/{HOT[0]}", headers=(("range", "bytes=4000-"),)),
    Ask(f"/{THINGS}/{HOT[0]}", headers=(("range", "bytes=9999-"),)),
    Ask(f"/{THINGS}/size-0"),
    Ask(f"/{THINGS}/%22%C3%BC%22", "HEAD"),
    Ask(f"/{THINGS}/a%5Cb"),
    Ask(f"/{THINGS}/missing"),
    Ask(f"/{THINGS}/{HOT[0]}", way=Way.QUERY),
    Ask(f"/{OPEN}/size-{4 * KIB}", way=Way.NONE),
    Ask(f"/{THINGS}/{HOT[0]}", flaw=Flaw.BIT),
    Ask(f"/{THINGS}/{HOT[0]}", caller="reader"),
)


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world() as made:
        yield made


def ask_both(made: World, addresses: tuple[tuple[str, int], ...]) -> None:
    """Send the same requests in the same order to all addresses, on few connections."""
    chance = random.Random(1)
    with ExitStack() as stack:
        lines = [stack.enter_context(Line(address)) for address in addresses]
        for _ in range(TIMES):
            ask = chance.choice(ASKS)
            agent = chance.choice(AGENTS)
            raw = made.raw(replace(ask, headers=(*ask.headers, ("user-agent", agent))))
            replies = [line.ask(raw).masked() for line in lines]
            assert replies[0] == replies[-1], raw


def counts(found: Gateway) -> Counter[str]:
    """Return the figures of a gateway that are equal after equal traffic."""
    lines = found.admin("/metrics")[1].splitlines()
    named = [line.rsplit(" ", 1) for line in lines if COUNTED.fullmatch(line)]
    return Counter({name: round(float(value)) for name, value in named})


def test_metrics_count_repeated_answers_like_all_others(made: World) -> None:
    both = (made.without, made.with_door)
    before, known = [counts(found) for found in both], repeated(made.with_door)
    ask_both(made, (made.plain_address, made.door_address))
    grown = [counts(found) - earlier for found, earlier in zip(both, before, strict=True)]
    assert grown[1] == grown[0]
    assert sum(count for name, count in grown[0].items() if "lake_s3_requests_total" in name) == TIMES
    assert grown[0]["lake_s3_sent_bytes_total"] > TIMES * KIB
    assert DEVICES or repeated(made.with_door) > known + TIMES / 10


@pytest.mark.parametrize("sample", ["1", "1/7"])
def test_the_access_log_has_the_lines_of_repeated_answers(made: World, tmp_path: Path, sample: str) -> None:
    logs = [tmp_path / "plain", tmp_path / "door"]
    with ExitStack() as stack:
        found = [
            stack.enter_context(
                gateway(
                    made.engine.server,
                    *(*SETTINGS, *door(state), "--s3-access-log", str(log), "--s3-access-log-sample", sample),
                )
            )
            for state, log in zip(("off", "on"), logs, strict=True)
        ]
        addresses = tuple(address_of(one.url) for one in found)
        ask_both(made, addresses)
    plain, through_door = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    if sample == "1":
        assert _without_own(through_door) == _without_own(plain)
        assert len(plain) == TIMES
    else:
        assert abs(len(through_door) - TIMES / 7) < 3
    ids = [line["request_id"] for line in through_door]
    assert len(set(ids)) == len(ids), "two requests with one id"
    for line in through_door:
        assert 0 <= line["first_byte_ms"] <= line["total_ms"] < 60_000
        assert line["remote"].startswith("127.0.0.1:")


def _without_own(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps({name: value for name, value in line.items() if name not in OWN}) for line in lines)


def test_a_team_counts_the_answers_of_all_its_processes(made: World) -> None:
    with gateway(made.engine.server, *SETTINGS, *door("on"), "--processes", "2") as team:
        raw = made.raw(ASKS[0])
        for _ in range(10):
            with Line(address_of(team.url)) as line:
                assert [line.ask(raw).status for _ in range(TIMES // 10)] == [200] * (TIMES // 10)
        until(lambda: figure(team, "lake_s3_requests_total", 'operation="GetObject"') == TIMES)
        assert DEVICES or repeated(team) > TIMES / 2


def test_request_ids_are_never_given_twice(made: World) -> None:
    raws = [made.raw(ask) for ask in ASKS]
    with Line(made.door_address) as line:
        ids = [line.ask(raws[number % len(raws)]).header("x-amz-request-id") for number in range(TIMES)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[0-9A-F]{16}", found) for found in ids)


def test_a_door_with_little_memory_answers_right(made: World) -> None:
    """Many more answers than fit: they take each other's places."""
    settings = (*SETTINGS, *door("on"), "--s3-door-memory", "64K")
    with gateway(made.engine.server, *settings) as little, Line(address_of(little.url)) as line:
        chance = random.Random(2)
        for _ in range(2000):
            key, number = chance.choice(HOT[:2]), chance.randrange(300)
            raw = made.raw(Ask(f"/{THINGS}/{key}", query=(("x-id", f"{number}"),)))
            assert line.ask(raw).body == content(key)
        assert DEVICES or repeated(little) > 0
