"""Server CPU per S3 operation, signed, 8 connections kept open where no other number is named, against openlaked;
GETs against nginx, too.

Contents are all different and incompressible, so no server can deduplicate or compress them.  Objects that are read
are hot.  Every PUT of a round has new content, for keys that are overwritten from round to round.  A PUT is as
durable as its server makes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from itertools import count, cycle, islice
from typing import Final

import lakefs
from bench.harness.content import window
from bench.harness.measure import Bench, Goal, Scenario, at_most
from bench.harness.s3_contest import CONNECTIONS, Work, contest_of, same
from bench.harness.s3_load import Load, WrongAnswer, ask
from bench.harness.s3_requests import BUCKET, UNSIGNED, Request, Signer
from bench.peers.s3_sides import Server

KIB: Final = 1 << 10
MIB: Final = 1 << 20
QUICK_BYTES: Final = 4 * MIB + 64 * KIB
LISTED: Final = 100_000
PAGE_KEYS: Final = 1000
LISTED_BYTES: Final = 16
FILL_CONNECTIONS: Final = 64
FILL_TOGETHER: Final = 10_000
READ_BACK: Final = 16
"""Number of a round's stored objects that are read back and compared."""


def no_renewal() -> None:
    """Do nothing: contents stay from round to round."""


@contextmanager
def getting(size: int, keys: int, requests: int, ranged: tuple[int, ...] = ()) -> Iterator[Work]:
    """Context manager: GETs of `keys` objects in turn; `ranged`: of 4 KiB at each of these offsets."""
    contents = {f"get/{number:04}": bytes(window(size)) for number in range(keys)}
    spans = [(offset % size, 4 * KIB) for offset in ranged] or [(0, size)]

    def fill(server: Server) -> None:
        for key, content in contents.items():
            server.put(key, content)

    def one(signer: Signer, key: str, span: tuple[int, int]) -> Request:
        first, length = span
        extra = f"Range: bytes={first}-{first + length - 1}\r\n" if ranged else ""
        status = 206 if ranged else 200
        return signer.request("GET", f"/{BUCKET}/{key}", extra=extra, status=status, answer_bytes=length)

    def made(server: Server, signer: Signer) -> Sequence[Request]:
        different = [one(signer, key, span) for span in spans for key in contents]
        return list(islice(cycle(different), requests))

    def check(server: Server) -> None:
        signer = Signer(server.endpoint)
        for key, content in contents.items():
            for first, length in spans:
                _, got = ask(server.endpoint, one(signer, key, (first, length)))
                same(server, key, content[first : first + length], got)

    yield Work(fill, no_renewal, made, check)


@contextmanager
def putting(size: int, requests: int, *, signed: bool) -> Iterator[Work]:
    """Context manager: PUTs of new content, each to a new key."""
    bodies: list[memoryview] = []
    hashes = [UNSIGNED] * requests
    rounds = count(1)
    folder = ""

    def path(number: int) -> str:
        return f"/{BUCKET}/put/{folder}/{number:06}"

    def renew() -> None:
        nonlocal folder
        folder = str(next(rounds))
        bodies[:] = [window(size) for _ in range(requests)]
        if signed:
            hashes[:] = [sha256(body).hexdigest() for body in bodies]

    def made(server: Server, signer: Signer) -> Sequence[Request]:
        return [
            signer.request("PUT", path(number), body=body, payload_hash=digest)
            for number, (body, digest) in enumerate(zip(bodies, hashes, strict=True))
        ]

    def check(server: Server) -> None:
        signer = Signer(server.endpoint)
        for number in range(0, requests, max(1, requests // READ_BACK)):
            _, got = ask(server.endpoint, signer.request("GET", path(number)))
            same(server, path(number), bytes(bodies[number]), got)

    yield Work(lambda server: None, renew, made, check)


@contextmanager
def mixing(size: int, keys: int, requests: int) -> Iterator[Work]:
    """Context manager: GETs of `keys` objects in turn; every tenth request is a PUT of new content to one of them."""
    given: dict[str, list[bytes]] = {}

    def fill(server: Server) -> None:
        for number in range(keys):
            server.put(f"mixed/{number:04}", bytes(window(size)))

    def renew() -> None:
        given.clear()

    def made(server: Server, signer: Signer) -> Sequence[Request]:
        given.clear()
        return [one(signer, number) for number in range(requests)]

    def one(signer: Signer, number: int) -> Request:
        key = f"mixed/{number * 7 % keys:04}"
        if number % 10:
            return signer.request("GET", f"/{BUCKET}/{key}", answer_bytes=size)
        body = bytes(window(size))
        given.setdefault(key, []).append(body)
        return signer.request("PUT", f"/{BUCKET}/{key}", body=body, payload_hash=sha256(body).hexdigest())

    def check(server: Server) -> None:
        signer = Signer(server.endpoint)
        for key, bodies in given.items():
            _, got = ask(server.endpoint, signer.request("GET", f"/{BUCKET}/{key}"))
            same(server, key, got if got in bodies else bodies[-1], got)

    yield Work(fill, renew, made, check)


@contextmanager
def _listing(bench: Bench) -> Iterator[Work]:
    """Context manager: the first page of 1,000 keys, of 100,000 small objects in one folder."""
    names = [f"list/{number:09}" for number in range(bench.scale.pick(LISTED, 1100))]

    def fill(server: Server) -> None:
        if server.engine:  # the same names, stored faster
            with lakefs.connect(server.engine) as lake:
                for begin in range(0, len(names), FILL_TOGETHER):
                    some = names[begin : begin + FILL_TOGETHER]
                    lake.put_many([(f"{BUCKET}/{name}", bytes(window(LISTED_BYTES))) for name in some])
            return
        signer = Signer(server.endpoint)
        with Load(server.endpoint, FILL_CONNECTIONS) as load:
            load.run(
                signer.request("PUT", f"/{BUCKET}/{name}", body=window(LISTED_BYTES), payload_hash=UNSIGNED)
                for name in names
            )

    def page(signer: Signer) -> Request:
        return signer.request("GET", f"/{BUCKET}", query=f"list-type=2&max-keys={PAGE_KEYS}&prefix=list%2F")

    def made(server: Server, signer: Signer) -> Sequence[Request]:
        return [page(signer)] * 8

    def check(server: Server) -> None:
        _, got = ask(server.endpoint, page(Signer(server.endpoint)))
        if re.findall(r"<Key>([^<]*)</Key>", got.decode()) != names[:PAGE_KEYS]:
            raise WrongAnswer(f"{server.name}: the page is not the first {PAGE_KEYS} keys")

    yield Work(fill, no_renewal, made, check)


def _get(size: int, keys: int, requests: int, **more: tuple[int, ...]) -> _SetUp:
    def set_up(bench: Bench) -> AbstractContextManager[Work]:
        few = bench.scale.pick(size, min(size, QUICK_BYTES))
        return getting(few, keys, bench.scale.pick(requests, 8), **more)

    return set_up


def _put(size: int, requests: int, *, signed: bool) -> _SetUp:
    def set_up(bench: Bench) -> AbstractContextManager[Work]:
        few = bench.scale.pick(size, min(size, QUICK_BYTES))
        return putting(few, bench.scale.pick(requests, 8), signed=signed)

    return set_up


_SetUp = Callable[[Bench], AbstractContextManager[Work]]
_RANGES: Final = tuple(place * 4 * MIB + 12_345 for place in range(16))
"""Offsets across the 64 MiB, on no boundary."""


def _mixed(size: int, keys: int, requests: int) -> _SetUp:
    return lambda bench: mixing(size, keys, bench.scale.pick(requests, 20))


def _row(
    name: str,
    what: str,
    limit: float,
    expected_s: float,
    set_up: _SetUp,
    connections: int = CONNECTIONS,
    **others: Goal | None,
) -> Scenario:
    goals = {"openlaked": at_most(limit, "x"), **others}
    stores = name.startswith("put-")
    return contest_of(
        f"s3-{name}", f"S3 {what}", goals, set_up, expected_s=expected_s, stores=stores, connections=connections
    )


SCENARIOS: Final[tuple[Scenario, ...]] = (
    _row("get-4k", "GET of 4 KiB, hot", 0.22, 20, _get(4 * KIB, 100, 8000), nginx=None),
    _row(
        "get-4k-64",
        "GET of 4 KiB, hot, 64 connections",
        0.18,
        20,
        _get(4 * KIB, 100, 8000),
        64,
        nginx=at_most(1.2, "x"),
    ),
    _row("get-4k-1", "GET of 4 KiB, hot, 1 connection", 0.2, 20, _get(4 * KIB, 100, 4000), 1, nginx=None),
    _row("put-4k", "PUT of 4 KiB, durable", 0.08, 18, _put(4 * KIB, 1000, signed=True)),
    _row("put-4k-64", "PUT of 4 KiB, durable, 64 connections", 0.06, 18, _put(4 * KIB, 2000, signed=True), 64),
    _row("mixed-4k", "9 GETs to a PUT of 4 KiB, 100 keys, 64 connections", 0.2, 20, _mixed(4 * KIB, 100, 4000), 64),
    _row("get-1m", "GET of 1 MiB", 0.35, 15, _get(MIB, 16, 400), nginx=at_most(1.15, "x")),
    _row("get-64m", "GET of 64 MiB", 0.8, 40, _get(64 * MIB, 2, 24), nginx=at_most(1.25, "x")),
    _row("put-1m", "PUT of 1 MiB, UNSIGNED-PAYLOAD", 0.4, 12, _put(MIB, 96, signed=False)),
    _row("put-1m-signed", "PUT of 1 MiB, payload signed", 0.5, 12, _put(MIB, 96, signed=True)),
    _row("put-64m", "PUT of 64 MiB, UNSIGNED-PAYLOAD", 0.5, 28, _put(64 * MIB, 8, signed=False)),
    _row("put-64m-signed", "PUT of 64 MiB, payload signed", 0.8, 28, _put(64 * MIB, 8, signed=True)),
    _row("range-4k", "4 KiB of 64 MiB, by range", 0.05, 45, _get(64 * MIB, 2, 1600, ranged=_RANGES), nginx=None),
    _row("list", "LIST of 1,000 of 100,000 keys", 0.2, 115, _listing),
)
