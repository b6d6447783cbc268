"""Reads of whole content without a lease: whatever gc frees during the read, the reader gets one whole version."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import trio

from lakefs.content.verify import Check
from lakefs.lake.lake_steps import LakeSteps
from lakefs.limits import UNLEASED_BELOW_BYTES
from lakefs.steps.steps import Step, Steps
from lakefs.wire import messages as m
from lakefs.wire.engine_port import Reply
from lakefs.wire.given_leases import given_leases
from tests.contract.collecting import collected_by
from tests.contract.engines import KINDS, Engine, Kind
from tests.contract.test_lake import Driven, content_of, run
from tests.seen_steps import seen
from tests.store_rig import change

T = TypeVar("T")


def _get(steps: LakeSteps, names: list[str]) -> Steps[list[bytes]]:
    return [(yield from steps.get(names[0]))]


def _get_many(steps: LakeSteps, names: list[str]) -> Steps[list[bytes]]:
    return (yield from steps.get_many(names))


def _get_many_into(steps: LakeSteps, names: list[str]) -> Steps[list[bytes]]:
    buffers = [bytearray(500_000) for _ in names]
    sizes = yield from steps.get_many_into(names, buffers)
    return [bytes(buffer[:size]) for buffer, size in zip(buffers, sizes, strict=True)]


def _overtaken(reading: Steps[T], meanwhile: Callable[[], Steps[None]]) -> Steps[T]:
    """Take the same steps; after they have first opened something, run `meanwhile` before they get the answer."""
    is_open = False

    def see(_: Step, answer: object) -> Steps[None] | None:
        nonlocal is_open
        if is_open or not (isinstance(answer, Reply) and isinstance(answer.message, m.OpenResults)):
            return None
        is_open = True
        return meanwhile()

    return seen(reading, see)


@pytest.mark.parametrize(
    ("way", "names"),
    [
        (_get, ["bkt/changes"]),
        (_get_many, ["bkt/stays", "bkt/changes", "bkt/inline"]),
        (_get_many_into, ["bkt/inline", "bkt/stays", "bkt/changes"]),
    ],
)
def test_content_that_gc_frees_before_it_was_read_is_read_anew(
    kind: Kind, way: Callable[[LakeSteps, list[str]], Steps[list[bytes]]], names: list[str]
) -> None:
    contents = {"bkt/stays": content_of(300_000), "bkt/changes": content_of(200_000), "bkt/inline": b"comes inline"}

    async def body(lake: Driven) -> None:
        steps = lake.steps

        def meanwhile() -> Steps[None]:
            contents["bkt/changes"] = content_of(150_000)
            yield from steps.put("bkt/changes", contents["bkt/changes"])
            assert (yield from collected_by(steps)) == 1

        for name, content in contents.items():
            await lake.run(steps.put(name, content))
        found = await lake.run(_overtaken(way(steps, names), meanwhile))
        assert found == [contents[name] for name in names]
        assert lake.count(m.OpenObjects) == 2

    run(kind, body)


@pytest.mark.parametrize("check", [Check.BLAKE3, Check.NONE])
def test_a_lease_is_taken_for_long_content_and_for_what_is_not_checked(kind: Kind, check: Check) -> None:
    async def body(lake: Driven) -> None:
        object.__setattr__(lake.steps, "check", check)
        held: list[int] = []

        def look() -> Steps[None]:
            held.append((yield from lake.steps.status())["clients"]["leases"])

        await lake.run(lake.steps.put_many([("bkt/a", b"inline"), ("bkt/b", content_of(70_000))]))
        await lake.run(lake.steps.put("bkt/long", content_of(UNLEASED_BELOW_BYTES)))
        for names in (["bkt/a", "bkt/b"], ["bkt/a", "bkt/long"]):
            contents = await lake.run(_overtaken(lake.steps.get_many(names), look))
            assert contents[0] == b"inline"
        assert held == ([2, 2] if check is Check.NONE else [0, 1])

    run(kind, body)


@pytest.mark.parametrize("name", ["unix", "tcp"])
def test_an_answer_that_nobody_waits_for_any_more_gives_its_leases_back(name: str) -> None:
    async def body(engine: Engine) -> None:
        async def open_and_close() -> None:
            message = (await engine.client.call(m.OpenObjects([("bkt", "k")]))).message
            with trio.CancelScope(shield=True):
                await engine.client.call(m.CloseLeases(given_leases(message)))

        await engine.client.call(m.PutObjects([5], [change("k", b"")]), [b"bytes"])
        for _ in range(50):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(open_and_close)
                while not engine.held()[3]:
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()  # the engine has answered, or is about to
        with trio.fail_after(10):
            while engine.held()[3]:  # noqa: ASYNC110 - as a user sees it
                await trio.sleep(0.01)

    KINDS[name].run(body)
