"""Creation of buckets, on every kind of client: on request only, never because of a slip in a name."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

from lakefs.errors import AlreadyExists, BucketNotFound, InvalidName
from lakefs.lake.lake_steps import LakeSteps
from lakefs.names import Name
from lakefs.steps.steps import Steps
from lakefs.wire import messages as m
from tests.contract.engines import Kind
from tests.contract.test_lake import MANY, Driven, run
from tests.old_buckets import OLD_NAMES, any_new_name


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
            with pytest.raises(BucketNotFound, match="create_bucket"):
                await lake.run(refused)
        assert lake.count(m.StoreChunks) == lake.count(m.StoreFromSource) == 0, "large content was moved first"
        assert [bucket.name for bucket in await lake.run(steps.buckets())] == ["bkt"]
        for number, making in enumerate(makings(steps)):
            await lake.run(making(f"made{number}/k"))
        assert len(await lake.run(steps.buckets())) == 1 + len(makings(steps))

    run(kind, body)


def test_a_bucket_that_is_made_has_a_name_that_s3_takes(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        steps = lake.steps
        await lake.run(steps.put("bkt/a/x", b"x"))
        lake.asked.clear()
        for name in OLD_NAMES:
            with pytest.raises(InvalidName, match=f"{name!r} is not valid: .* example: my-models"):
                await lake.run(steps.create_bucket(name))
            for making in makings(steps):
                with pytest.raises(InvalidName, match=f"{name!r} is not valid: .* example: my-models"):
                    await lake.run(making(f"{name}/k"))
        assert lake.count(m.StoreChunks) == lake.count(m.StoreFromSource) == 0, "large content was moved first"
        assert [bucket.name for bucket in await lake.run(steps.buckets())] == ["bkt"]
        assert await lake.run(steps.exists("bkt/a/x"))

    run(kind, body)


def test_a_bucket_with_another_name_that_exists_is_used_as_any_other(kind: Kind) -> None:
    async def body(lake: Driven) -> None:
        steps = lake.steps
        with any_new_name():
            for name in OLD_NAMES:
                await lake.run(steps.create_bucket(name))
        await lake.run(steps.put("bkt/a/x", b"x"))
        for name in OLD_NAMES:
            with pytest.raises(AlreadyExists):
                await lake.run(steps.create_bucket(name))
            for number, making in enumerate(makings(steps, moves=kind.moves_anywhere)):
                await lake.run(steps.put("bkt/a/x", b"x"))
                await lake.run(making(f"{name}/k{number}"))
            await lake.run(steps.put(f"{name}/old", MANY))
            stored = await lake.run(steps.stat(f"{name}/old"))
            if not kind.moves_anywhere:  # some of these buckets are in the shard of the other
                await lake.run(steps.copy(f"{name}/old", f"bkt/{name}"))
                await lake.run(steps.remove(f"{name}/old"))
            else:
                await lake.run(steps.move(f"{name}/old", f"bkt/{name}"))
            assert (await lake.run(steps.stat(f"bkt/{name}"))).blob == stored.blob
            assert (await lake.run(steps.set_bucket(name, anonymous_read=True))).anonymous_read
            listed = await lake.run(steps.list_page(f"{name}/"))
            assert len(listed.entries) == len(makings(steps, moves=kind.moves_anywhere))
            await lake.run(steps.remove_many([Name(name, entry.key) for entry in listed.entries]))
            assert [bucket.name for bucket in await lake.run(steps.buckets())].count(name) == 1
            await lake.run(steps.remove_bucket(name))
        assert [bucket.name for bucket in await lake.run(steps.buckets())] == ["bkt"]

    run(kind, body)


def makings(steps: LakeSteps, *, moves: bool = True) -> list[Callable[[str], Steps[object]]]:
    """Return operations that make a name in a bucket, and the bucket too if it is missing.

    `moves`: also one that moves a name of another bucket.
    """
    return [
        lambda name: steps.put(name, b"x", create_bucket=True),
        lambda name: steps.put(name, MANY, create_bucket=True),
        lambda name: steps.put(name, io.BytesIO(MANY), create_bucket=True),
        lambda name: steps.put_many([(name, b"x")], create_bucket=True),
        lambda name: steps.copy("bkt/a/x", name, create_bucket=True),
        lambda name: steps.make_folder(name, create_bucket=True),
        *([lambda name: steps.move("bkt/a/x", name, create_bucket=True)] if moves else []),
    ]
