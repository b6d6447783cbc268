"""Who makes a bucket: whoever asks for it, with any kind of client, and nobody by a slip in a name."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from lakefs.errors import BucketNotFound
from lakefs.steps import Steps
from lakefs.wire import messages as m
from tests.contract.engines import Kind
from tests.contract.test_lake import MANY, Driven, run


def test_a_bucket_is_made_only_when_that_is_asked_for(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        steps = lake.steps
        await lake.run(steps.put("bkt/a/x", b"x"))
        lake.asked.clear()
        for refused in (
            steps.put("fresh/k", b"x"),
            steps.put("fresh/k", MANY),
            steps.put("fresh/k", io.BytesIO(MANY)),
            steps.put_many([("fresh/k", b"x")]),
            steps.copy("bkt/a/x", "fresh/k"),
            steps.move("bkt/a/x", "fresh/k"),
            steps.move("bkt/a/", "fresh/k/"),
            steps.make_folder("fresh/k"),
        ):
            with pytest.raises(BucketNotFound, match="lake bucket create fresh"):
                await lake.run(refused)
        assert lake.count(m.StoreChunks) == lake.count(m.StoreFromSource) == 0, (
            "large content was moved first"
        )
        assert [bucket.name for bucket in await lake.run(steps.buckets())] == ["bkt"]
        makings: list[Callable[[str], Steps[object]]] = [
            lambda name: steps.put(name, b"x", create_bucket=True),
            lambda name: steps.put(name, MANY, create_bucket=True),
            lambda name: steps.put_many([(name, b"x")], create_bucket=True),
            lambda name: steps.copy("bkt/a/x", name, create_bucket=True),
            lambda name: steps.move("bkt/a/x", name, create_bucket=True),
            lambda name: steps.make_folder(name, create_bucket=True),
        ]
        for number, making in enumerate(makings):
            await lake.run(making(f"made{number}/k"))
        assert len(await lake.run(steps.buckets())) == 7

    run(kind, body)
