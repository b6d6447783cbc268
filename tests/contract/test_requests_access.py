"""Requests about access keys and buckets' settings; on every kind of client."""

from __future__ import annotations

import re

import pytest

from lakefs.errors import AccessKeyNotFound, BucketNotFound, InvalidArgument, InvalidName, RequestTooLarge
from lakefs.limits import ACCESS_KEY_BUCKETS_MAX
from lakefs.wire import messages as m
from lakefs.wire.engine_port import EngineClient
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.store_rig import ask, fsck


async def created(client: EngineClient, *buckets: str, read_only: bool = False) -> m.AccessKeyStat:
    (made,) = (await ask(client, m.AccessKeyCreate(list(buckets), read_only), m.AccessKeys)).keys
    return made


async def listed(client: EngineClient, request: m.AccessKeyList) -> list[m.AccessKeyStat]:
    return (await ask(client, request, m.AccessKeys)).keys


async def bucket(client: EngineClient, name: str) -> m.BucketStat:
    (found,) = (await ask(client, m.BucketList(name), m.Buckets)).buckets
    return found


def test_an_access_key_is_answered_with_its_secret_once_and_kept_for_whoever_asks_for_it(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        made = await created(client, "models", "data", "models", read_only=True)
        assert re.fullmatch(r"[A-Z2-7]{20}", made.access_key)
        assert re.fullmatch(r"[A-Za-z0-9_-]{40}", made.secret_key)
        assert (made.buckets, made.read_only) == (["models", "data"], True)
        assert made.created_ns > 0
        other = await created(client)
        assert (other.buckets, other.read_only) == ([], False)
        assert len({made.access_key, other.access_key, made.secret_key, other.secret_key}) == 4

        async with engine.connect() as second:
            keys = await listed(second, m.AccessKeyList())
            assert [found.access_key for found in keys] == sorted([made.access_key, other.access_key])
            assert {found.secret_key for found in keys} == {""}
            assert [found.secret_key for found in await listed(second, m.AccessKeyList(made.access_key))] == [""]
            assert await listed(second, m.AccessKeyList(made.access_key, secrets=True)) == [made]
            assert made in await listed(second, m.AccessKeyList(secrets=True))
        assert (await fsck(client))["damage"] == 0

    kind.run(body)


def test_a_revoked_access_key_is_gone_at_once(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        made, kept = await created(client), await created(client)
        async with engine.connect() as second:
            await ask(second, m.AccessKeyRemove(made.access_key), m.Done)
            assert await listed(client, m.AccessKeyList(made.access_key, secrets=True)) == []
            assert [found.access_key for found in await listed(client, m.AccessKeyList())] == [kept.access_key]
        for unknown in (made.access_key, "nobody", "\xff" * 20, "x" * 600):
            await refused(client, AccessKeyNotFound, m.AccessKeyRemove(unknown))
            assert await listed(client, m.AccessKeyList(unknown)) == []
        await refused(client, AccessKeyNotFound, m.AccessKeyRemove(""))

    kind.run(body)


def test_access_keys_are_listed_in_pages(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        names = sorted([(await created(client)).access_key for _ in range(5)])
        found: list[str] = []
        after = ""
        for _ in range(3):
            page = await ask(client, m.AccessKeyList(after=after, limit=2), m.AccessKeys)
            found += [one.access_key for one in page.keys]
            after = page.next_after
        assert (found, after) == (names, "")
        assert [one.access_key for one in await listed(client, m.AccessKeyList(after=names[3]))] == names[4:]
        await refused(client, InvalidArgument, m.AccessKeyList(limit=0))

    kind.run(body)


def test_an_access_key_that_makes_no_sense_is_refused(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        many = [f"b{number:03}" for number in range(ACCESS_KEY_BUCKETS_MAX + 1)]
        await refused(engine.client, InvalidArgument, m.AccessKeyCreate(many))
        await refused(engine.client, InvalidName, m.AccessKeyCreate(["no bucket!"]))
        assert await listed(engine.client, m.AccessKeyList()) == []

    kind.run(body)


def test_a_secret_is_in_no_representation_of_what_has_it(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        made = await created(engine.client, "models")
        told = f"{made!r} {m.AccessKeys([made])!r} {made}"
        assert made.secret_key not in told
        assert made.access_key in told

    kind.run(body)


def test_a_bucket_s_tags_and_cors_rules_stay_beside_its_other_settings(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
        rules = [m.CorsRule(["http://*"], ["GET"], ["*"], ["etag"], 5, "one"), m.CorsRule(["*"], ["PUT"])]
        (answer,) = (await ask(client, m.BucketSet("bkt", tags={"a": "ü", "b": ""}, cors=rules), m.Buckets)).buckets
        assert (answer.tags, answer.cors) == ({"a": "ü", "b": ""}, rules)
        await ask(client, m.BucketSet("bkt", anonymous_read=True, versioning="enabled"), m.Buckets)
        kept = await bucket(client, "bkt")
        assert (kept.tags, kept.cors, kept.anonymous_read, kept.versioning) == (answer.tags, rules, True, "enabled")
        (listed,) = (await ask(client, m.BucketList(), m.Buckets)).buckets
        assert (listed.tags, listed.cors, listed.anonymous_read) == ({}, [], True)
        await refused(client, RequestTooLarge, m.BucketSet("bkt", tags={"a": "x" * (32 << 10)}))
        await ask(client, m.BucketSet("bkt", tags={}), m.Buckets)
        left = await bucket(client, "bkt")
        assert (left.tags, left.cors) == ({}, rules)
        await ask(client, m.BucketSet("bkt", cors=[]), m.Buckets)
        assert await bucket(client, "bkt") == m.BucketStat("bkt", left.created_ns, left.node, True, "enabled")

    kind.run(body)


def test_a_bucket_s_settings_are_changed_one_by_one_and_stay(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
        new = await bucket(client, "bkt")
        assert (new.anonymous_read, new.versioning) == (False, "")
        (answer,) = (await ask(client, m.BucketSet("bkt", anonymous_read=True), m.Buckets)).buckets
        assert answer == await bucket(client, "bkt") == m.BucketStat("bkt", new.created_ns, new.node, True, "")
        await ask(client, m.BucketSet("bkt", versioning="enabled"), m.Buckets)
        await ask(client, m.BucketSet("bkt"), m.Buckets)
        assert await bucket(client, "bkt") == m.BucketStat("bkt", new.created_ns, new.node, True, "enabled")
        await ask(client, m.BucketSet("bkt", anonymous_read=False, versioning="suspended"), m.Buckets)
        assert await bucket(client, "bkt") == m.BucketStat("bkt", new.created_ns, new.node, False, "suspended")
        for versioning in ("", "on"):
            await refused(client, InvalidArgument, m.BucketSet("bkt", versioning=versioning))
        await refused(client, BucketNotFound, m.BucketSet("nowhere", anonymous_read=True))
        await ask(client, m.BucketRemove("bkt"), m.Done)
        await ask(client, m.BucketCreate("bkt"), m.Buckets)
        again = await bucket(client, "bkt")
        assert (again.anonymous_read, again.versioning) == (False, "")

    kind.run(body)


@pytest.mark.parametrize("secrets", [False, True])
def test_an_access_key_s_limits_are_those_it_was_made_with(kind: Kind, secrets: bool) -> None:
    async def body(engine: Engine) -> None:
        made = await created(engine.client, "a", "b")
        (found,) = await listed(engine.client, m.AccessKeyList(made.access_key, secrets=secrets))
        assert (found.buckets, found.read_only, found.created_ns) == (["a", "b"], False, made.created_ns)

    kind.run(body)
