"""Requests sent in pieces and in batches, and the bytes that come back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hypothesis import strategies as st

from tests.door.asks import Ask, raw_of
from tests.door.line import Line, Reply, without_own
from tests.door.stored import KIB, OPEN, THINGS, content_of
from tests.door.world import World

KEYS: Final = tuple(f"batch-{number}" for number in range(3))
"""Objects that batches write and read."""
BATCH_MAX: Final = 20


@dataclass(frozen=True)
class Batch:
    """Requests that are sent at once, in so many pieces."""

    asks: tuple[Ask, ...]
    pieces: int
    seed: int


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Draw 2 to 20 requests: reads and writes of the same few objects, and reads of those that the door repeats."""
    asks = []
    for number in range(draw(st.integers(2, BATCH_MAX))):
        kind = draw(st.sampled_from(("GET", "GET", "GET", "HEAD", "PUT", "DELETE")))
        key = draw(st.sampled_from((*KEYS, f"size-{4 * KIB}", f"size-{64 * KIB}")))
        if key not in KEYS:
            kind = "GET" if kind == "PUT" else "HEAD" if kind == "DELETE" else kind
        path = f"/{THINGS}/{key}"
        if kind == "PUT":
            body = content_of(draw(st.sampled_from((0, 10, 9000, 70_000))), f"{number}")
            asks.append(Ask(path, kind, headers=(("content-length", str(len(body))),), body=body))
        elif draw(st.integers(0, 5)) == 0:
            asks.append(Ask(f"/{OPEN}/size-{4 * KIB}", headers=(("range", f"bytes={number}-"),)))
        else:
            asks.append(Ask(path, kind))
    return Batch(tuple(asks), draw(st.integers(1, 5)), draw(st.integers(0, 1 << 20)))


def run_batch(made: World, address: tuple[str, int], batch: Batch) -> list[bytes]:
    """Send a batch on a connection on which one of its reads was answered before; return the masked answers."""
    forget(made)
    raws = [raw_of(ask, made.keys) for ask in batch.asks]
    first = made.raw(Ask(f"/{THINGS}/size-{4 * KIB}"))
    found: list[Reply] = []
    with Line(address) as line:
        found.append(line.ask(first))
        for piece in _split(b"".join(raws), batch.pieces, random.Random(batch.seed)):
            line.send_and_wait_until_read(piece)
        found += [line.reply(is_head=ask.method == "HEAD") for ask in batch.asks]
        line.end_sending()
        assert line.rest() == b""
    return [reply.masked(times=True) for reply in found]


def forget(made: World) -> None:
    """Remove what batches wrote."""
    for key in KEYS:
        made.lake.remove(f"{THINGS}/{key}")


def answers_in_pieces(address: tuple[str, int], pieces: Sequence[bytes]) -> bytes:
    """Send pieces one after the other, end, and return all that is answered, masked."""
    with Line(address) as line:
        for piece in pieces:
            line.send_and_wait_until_read(piece)
        line.end_sending()
        return without_own(line.rest())


def pieces_of(raw: bytes, chance: random.Random) -> list[bytes]:
    """Cut bytes into pieces of random sizes, 25 at most."""
    return _split(raw, chance.randint(2, 25), chance)


def _split(raw: bytes, count: int, chance: random.Random) -> list[bytes]:
    cuts = sorted(chance.randrange(1, len(raw)) for _ in range(count - 1))
    return [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True) if begin < end]
