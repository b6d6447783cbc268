"""Requests that list multipart uploads and their parts; on every kind of client."""

from __future__ import annotations

from lakefs.errors import BucketNotFound, InvalidArgument
from lakefs.limits import PART_NUMBER_MAX
from lakefs.wire import messages as m
from tests.contract.engines import Engine, Kind
from tests.contract.test_requests_chunks import refused
from tests.contract.test_requests_uploads import begin, make_bucket, parts, put_part
from tests.store_rig import ask

LONG = "n" * 480


def test_uploads_are_listed_in_byte_order_of_key_and_id(kind: Kind) -> None:
    keys = ["a", "a\x01", "a/b", "a/c/d", "b", LONG, LONG + "\x01", LONG + "a", LONG + "n" * 300, "z", "\u00e9"]

    async def body(engine: Engine) -> None:
        client = engine.client
        for bucket in ("bkt", "other"):
            await make_bucket(client, bucket)
            for key in reversed(keys):
                for _ in range(2):
                    await begin(client, key, bucket=bucket)
        everything = (await ask(client, m.UploadList("bkt"), m.Uploads)).entries
        found = [(entry.key.encode(), entry.upload) for entry in everything]
        assert [key for key, _ in found] == [key.encode() for key in sorted(keys) for _ in range(2)]
        assert found == sorted(found)
        for limit in (1, 2, 3):
            paged, after, after_upload = [], "", b""
            while True:
                page = await ask(client, m.UploadList("bkt", "", after, after_upload, limit=limit), m.Uploads)
                assert len(page.entries) <= limit
                paged += page.entries
                after, after_upload = page.next_after, page.next_upload
                if not after:
                    break
            assert paged == everything
        for key in keys:
            behind = [entry for entry in everything if entry.key > key]
            assert (await ask(client, m.UploadList("bkt", after=key), m.Uploads)).entries == behind
        for prefix in ("a", "a/", LONG, LONG + "n", LONG[:100], "nothing"):
            with_prefix = [entry for entry in everything if entry.key.startswith(prefix)]
            assert (await ask(client, m.UploadList("bkt", prefix), m.Uploads)).entries == with_prefix

    kind.run(body)


def test_uploads_are_rolled_up_at_the_delimiter(kind: Kind) -> None:
    deep = "p" * 500 + "/" + "q" * 100

    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        for key in ("a", "a/b", "a/c/d", "a/c/e", "a0", "b/", deep, deep + "x", "z"):
            await begin(client, key)

        async def listed(**options: str | int) -> list[str]:
            request = m.UploadList("bkt", delimiter="/", **options)  # type: ignore[arg-type]
            entries = (await ask(client, request, m.Uploads)).entries
            assert all(entry.is_prefix == (entry.upload == b"") for entry in entries)
            return [entry.key for entry in entries]

        assert await listed() == ["a", "a/", "a0", "b/", "p" * 500 + "/", "z"]
        assert await listed(prefix="a/") == ["a/b", "a/c/"]
        assert await listed(prefix="a/c/") == ["a/c/d", "a/c/e"]
        assert await listed(after="a/") == ["a0", "b/", "p" * 500 + "/", "z"]
        assert await listed(after="p" * 500 + "/") == ["z"]
        assert await listed(prefix="p") == ["p" * 500 + "/"]
        paged: list[str] = []
        after, after_upload = "", b""
        while True:
            page = await ask(client, m.UploadList("bkt", "", after, after_upload, "/", limit=1), m.Uploads)
            paged += [entry.key for entry in page.entries]
            after, after_upload = page.next_after, page.next_upload
            if not after:
                break
        assert paged == await listed()
        await refused(client, InvalidArgument, m.UploadList("bkt", limit=0))
        await refused(client, InvalidArgument, m.UploadList("bkt", after="a", after_upload=b"short"))
        await refused(client, BucketNotFound, m.UploadList("nowhere"))

    kind.run(body)


def test_uploads_are_rolled_up_at_any_delimiter(kind: Kind) -> None:
    keys = ["a", "a--b", "a--c/d", "a-b", "b--", "bé--x", "bé/y", LONG + "--x", LONG + "--y", LONG + "-z", "z"]

    def expected(prefix: str, delimiter: str) -> list[str]:
        found: list[str] = []
        for key in sorted(keys, key=str.encode):
            rest = key.removeprefix(prefix)
            if not key.startswith(prefix):
                continue
            begin = rest.find(delimiter)
            name = key if begin < 0 else prefix + rest[: begin + len(delimiter)]
            if name not in found[-1:]:
                found.append(name)
        return found

    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        for key in keys:
            await begin(client, key)
        for prefix in ("", "a", "a-", "b", LONG, "no"):
            for delimiter in ("-", "--", "/", "é", "a--", "z", "nn", "absent"):
                for limit in (1, 3, 1000):
                    paged, after, after_upload = [], "", b""
                    while True:
                        request = m.UploadList("bkt", prefix, after, after_upload, delimiter, limit)
                        page = await ask(client, request, m.Uploads)
                        paged += [entry.key for entry in page.entries]
                        after, after_upload = page.next_after, page.next_upload
                        if not after:
                            break
                    assert paged == expected(prefix, delimiter), (prefix, delimiter, limit)

    kind.run(body)


def test_parts_are_listed_in_pages_by_number(kind: Kind) -> None:
    async def body(engine: Engine) -> None:
        client = engine.client
        await make_bucket(client)
        upload = await begin(client, "k")
        numbers = [1, 2, 255, 256, 300, PART_NUMBER_MAX]
        for number in reversed(numbers):
            await put_part(client, upload, number, b"%d" % number)
        found, after = [], 0
        while True:
            page = await parts(client, upload, after=after, limit=2)
            found += [part.number for part in page.parts]
            after = page.next_after
            if not after:
                break
        assert found == numbers
        assert [part.number for part in (await parts(client, upload, after=255)).parts] == numbers[3:]
        assert (await parts(client, upload, after=PART_NUMBER_MAX)).parts == []
        for after, limit in ((0, 0), (-1, 1), (PART_NUMBER_MAX + 1, 1)):
            request = m.UploadParts(upload.bucket, upload.key, upload.upload, after, limit)
            await refused(client, InvalidArgument, request)

    kind.run(body)
