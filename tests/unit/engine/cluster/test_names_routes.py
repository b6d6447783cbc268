"""Batches of names are divided among shards, and their answers put together, without a change of order or content."""

from __future__ import annotations

import random

import pytest

from engine.head import names_routes as routes
from engine.head.client_names import WAYS
from engine.head.head import PASSED_ON
from lakefs.ids import NamesShard
from lakefs.limits import BATCH_MAX, DELETE_BATCH
from lakefs.wire import messages as m
from tests.store_rig import change

NAMES = [(f"bucket-{number % 7}", f"key-{number}") for number in range(40)]
NOW = m.Answered(1, 1)


def batches() -> list[routes.Batch]:
    versions = [f"version-{number}" for number in range(40)]
    conditions = [m.Condition(node=number) for number in range(40)]
    changes = [change(key, bucket=bucket, create_bucket=number % 2 == 0) for number, (bucket, key) in enumerate(NAMES)]
    return [
        m.StatNames(NAMES, durable=False, versions=versions),
        m.OpenObjects(NAMES, lease_from=7),
        m.DeleteNames(NAMES, m.Condition(absent=True), versions=versions),
        m.DeleteNames(NAMES, conditions=conditions, keep_folder=True),
        m.BindBlobs(NOW, changes, list(range(40)), list(range(1, 41)), folders=True),
    ]


@pytest.mark.parametrize("request_number", range(5))
def test_the_parts_of_a_batch_have_all_of_it_once(request_number: int) -> None:
    batch = batches()[request_number]
    chance = random.Random(request_number)
    places = [chance.randrange(3) for _ in NAMES]
    parts = {shard: [index for index, place in enumerate(places) if place == shard] for shard in range(3)}
    asked = {shard: routes.part_of(batch, indexes) for shard, indexes in parts.items()}
    for field in batch.__struct_fields__:
        whole = getattr(batch, field)
        is_divided = isinstance(whole, list) and whole
        for shard, indexes in parts.items():
            expected = [whole[index] for index in indexes] if is_divided else whole
            assert getattr(asked[shard], field) == expected, field
    assert routes.part_of(batch, range(40)) is batch
    wanted = routes.wanted_by_batch(batch)
    assert [each.bucket for each in wanted] == [bucket for bucket, _ in NAMES]
    assert any(each.makes for each in wanted) == isinstance(batch, m.BindBlobs)


def test_a_batch_that_no_shard_takes_is_not_divided() -> None:
    assert routes.wanted_by_batch(m.StatNames(NAMES, versions=["v"])) == []
    assert routes.wanted_by_batch(m.DeleteNames(NAMES, conditions=[m.Condition()] * 41)) == []
    assert routes.wanted_by_batch(m.BindBlobs(NOW, [change("k")] * 2, [1], [1, 1])) == []
    assert routes.wanted_by_batch(m.StatNames([("b", "k")] * (BATCH_MAX + 1))) == []
    assert routes.wanted_by_batch(m.DeleteNames([("b", "k")] * (DELETE_BATCH + 1))) == []
    assert routes.wanted_by_batch(m.StatNames([])) == []
    assert len(routes.wanted_by_batch(m.DeleteNames([("b", "k")] * DELETE_BATCH))) == DELETE_BATCH


def test_leases_go_to_the_shards_that_gave_them() -> None:
    stat = m.ObjectStat("bkt", "k", 2, 1, 1, "e", 1)
    leases = {}
    for shard in map(NamesShard, (0, 1, 7, 0xFFF)):
        for number in (1, 77, (1 << 48) - 1):
            given = m.OpenResults([m.OpenResult(m.OpenedObject(stat, number, [], [], []), None, b"stamps")])
            (result,) = routes.results_of(shard, given)
            assert isinstance(result, m.OpenResult)
            assert result.opened is not None
            assert result.stamps == b"stamps"
            leases[result.opened.lease] = (shard, number)
    assert len(leases) == 12
    for lease, (shard, number) in leases.items():
        assert routes.leases_by_shard([lease]) == {shard: [number]}
    none = m.OpenResults([m.OpenResult(m.OpenedObject(stat, 0, [], [], []))])
    assert routes.results_of(NamesShard(3), none) == none.results


def test_buckets_of_all_shards_are_in_byte_order_and_the_later_of_one_name_counts() -> None:
    answers = [
        m.Buckets([m.BucketStat("a-b", 5, 1), m.BucketStat("moved", 9, 2), m.BucketStat("z", 1, 3)]),
        m.Buckets([m.BucketStat("B", 1, 4), m.BucketStat("a", 2, 5), m.BucketStat("moved", 3, 6)]),
    ]
    for listed in (answers, answers[::-1]):
        found = routes.merged_buckets(listed).buckets
        assert [(stat.name, stat.node) for stat in found] == [("B", 4), ("a", 5), ("a-b", 1), ("moved", 2), ("z", 3)]


def test_every_request_about_buckets_and_names_has_a_way() -> None:
    """A request that names a bucket, and is asked at the first shard, would not find buckets of others."""
    of_heads: list[type[m.Request]] = [m.StatNames, m.OpenObjects, m.Copy, m.BindBlobs, m.BindPart, m.BindUpload]
    requests: list[type[m.Request]] = [*PASSED_ON, *of_heads, m.BindCopy]
    for request in requests:
        fields = {"bucket", "to_bucket", "names", "changes", "put", "complete", "upload"} & set(
            request.__struct_fields__
        )
        if fields or request is m.BindCopy:
            assert request in WAYS, request
