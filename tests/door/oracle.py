"""Requests drawn from the grammar, sent to a gateway with the door and to one without, between changes of the store.

python -m tests.door.oracle --requests 100000 --seed 7
"""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass
from typing import Final

from hypothesis import given, seed as seeded, strategies as st

from tests.door.asks import Ask
from tests.door.grammar import asks, drawn
from tests.door.stored import MOVING, OPEN, THINGS, Stored, content_of, put
from tests.door.world import World, figure, repeated, world
from tests.sim.__main__ import say

TIMES: Final = 3
"""Each request is sent so often: what the first teaches the door, the others are answered from."""
_SHARE_MIN: Final = 0.4
_REASONS: Final = "lake_s3_passed_on_total"


class Change(enum.Enum):
    """One change of the store, made before a request; both gateways must know of it at once."""

    PUT = "put"
    PUT_LARGE = "put 70,000 bytes"
    PUT_AGAIN = "put what it was, with other attributes"
    DELETE = "delete"
    TAG = "set tags"
    COPY = "copy another object to it"
    RENAME = "rename another object to it"
    FOLDER = "delete it and put an object below it"
    CLOSED = "close the open bucket to strangers"
    OPENED = "open it to strangers"


@dataclass(frozen=True)
class Step:
    """A change of the object with this key, if any, and a request."""

    change: Change | None
    key: str
    ask: Ask


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Draw a step.  One in five has a change; the request is then mostly about what has changed."""
    ask = draw(asks())
    if draw(st.integers(0, 4)):
        return Step(None, MOVING[0], ask)
    key = draw(st.sampled_from((MOVING[0], MOVING[0], *MOVING)))
    return Step(draw(st.sampled_from(Change)), key, ask)


def make(change: Change, key: str, made: World, number: int) -> None:
    """Make a change.  `number` makes its content unlike any other."""
    path, content = f"/{THINGS}/{key}", content_of(1000, f"{key} {number}")
    if change is not Change.FOLDER:
        made.lake.remove(f"{THINGS}/{key}/below")
    match change:
        case Change.PUT:
            put(made.send, made.keys, path, Stored(content))
        case Change.PUT_LARGE:
            put(made.send, made.keys, path, Stored(content_of(70_000, f"{number}")))
        case Change.PUT_AGAIN:
            put(made.send, made.keys, path, Stored(content_of(2000, key), {"x-amz-meta-number": str(number)}))
        case Change.DELETE:
            made.do(Ask(path, "DELETE"))
        case Change.TAG:
            made.lake.put(f"{THINGS}/{key}", content)
            body = f"<Tagging><TagSet><Tag><Key>a</Key><Value>{number}</Value></Tag></TagSet></Tagging>".encode()
            headers = (("content-length", str(len(body))),)
            tagged = made.do(Ask(path, "PUT", query=(("tagging", ""),), headers=headers, body=body))
            assert tagged.status == 200, tagged
        case Change.COPY:
            made.lake.put(f"{THINGS}/source", content)
            made.lake.copy(f"{THINGS}/source", f"{THINGS}/{key}")
        case Change.RENAME:
            made.lake.put(f"{THINGS}/source", content)
            made.lake.move(f"{THINGS}/source", f"{THINGS}/{key}")
        case Change.FOLDER:
            made.lake.remove(f"{THINGS}/{key}")
            made.lake.put(f"{THINGS}/{key}/below", content)
        case Change.CLOSED | Change.OPENED:
            made.lake.set_bucket(OPEN, anonymous_read=change is Change.OPENED)


def compare(made: World, count: int, seed: int | None = None, *, shrink: bool = True) -> None:
    """Draw so many steps; after each change, and for each request, both gateways must answer the same."""
    numbers = iter(range(1 << 62))

    @drawn(count, shrink=shrink)
    @given(steps())
    def one(step: Step) -> None:
        if step.change is not None:
            reads = [made.raw(Ask(f"/{THINGS}/{step.key}", method)) for method in ("GET", "HEAD") * 2]
            made.agree(reads)
            make(step.change, step.key, made, next(numbers))
            made.agree(reads)
        made.agree([made.raw(step.ask)] * TIMES)

    try:
        (one if seed is None else seeded(seed)(one))()
    finally:
        made.lake.set_bucket(OPEN, anonymous_read=True)


def main() -> int:
    """Run it; 0 when all answers were the same and the door gave its share of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.door.oracle")
    parser.add_argument("--requests", type=int, default=10_000, help="drawn; each is sent several times")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with world() as made:
        compare(made, asked.requests, asked.seed)
        share = repeated(made.with_door) / max(1, made.sent)
        say(
            f"{asked.requests} requests of seed {asked.seed}, {made.sent} times sent to each gateway: no answer "
            f"differs; the door gave {share:.0%}, and passed {figure(made.with_door, _REASONS):.0f} on"
        )
    return 0 if share >= _SHARE_MIN else 1


if __name__ == "__main__":
    raise SystemExit(main())
