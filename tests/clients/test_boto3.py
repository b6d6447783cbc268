"""boto3 as programs use it beyond single requests: transfers, paginators, waiters, resources, presigned URLs.

What each request means is tested with boto3 in `tests/e2e/test_s3_*.py`; here is what its conveniences make of them.
"""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("boto3", "boto3", also="resources, paginators, waiters, presigned POST is refused")


@works("put", "get", "ranges", "multipart", "checksums", "metadata")
def test_files_go_up_and_down_in_parts_with_their_checksums(gateway: Gateway) -> None:
    gateway.python(
        "boto3",
        """
        import filecmp, io, os
        from boto3.s3.transfer import TransferConfig
        parts = TransferConfig(multipart_threshold=5 << 20, multipart_chunksize=5 << 20, max_concurrency=4)
        for size in (0, 1, 100_000, 5 << 20, 16_000_000):
            with open("up", "wb") as file:
                file.write(os.urandom(size))
            extra = {"Metadata": {"size": str(size)}, "ContentType": "x/y", "ChecksumAlgorithm": "SHA256"}
            s3.upload_file("up", "of-boto3", f"file/{size}", Config=parts, ExtraArgs=extra)
            s3.download_file("of-boto3", f"file/{size}", "down", Config=parts)
            assert filecmp.cmp("up", "down", shallow=False)
            head = s3.head_object(Bucket="of-boto3", Key=f"file/{size}", ChecksumMode="ENABLED")
            assert (head["Metadata"], head["ContentType"]) == ({"size": str(size)}, "x/y")
            parts_tag = {5 << 20: '-1"', 16_000_000: '-4"'}.get(size, '"')
            assert head["ChecksumSHA256"] and head["ETag"].endswith(parts_tag), head
        pipe = io.BytesIO()
        s3.download_fileobj("of-boto3", "file/16000000", pipe, Config=parts)
        assert pipe.getvalue() == open("up", "rb").read()
        some = s3.get_object(Bucket="of-boto3", Key="file/16000000", Range="bytes=4194300-4194310")
        assert some["Body"].read() == pipe.getvalue()[4194300:4194311]
        """,
    )


@works("copy", "delete", "buckets", "list")
def test_resources_paginators_and_waiters(gateway: Gateway) -> None:
    gateway.python(
        "boto3",
        """
        lake = boto3.resource("s3", endpoint_url=s3.meta.endpoint_url)
        bucket = lake.create_bucket(Bucket="of-boto3-resources")
        bucket.wait_until_exists()
        keys = sorted(f"{folder}/{number}" for folder in "abc" for number in range(5))
        for key in keys:
            bucket.put_object(Key=key, Body=key.encode())
        lake.Object(bucket.name, keys[-1]).wait_until_exists()
        assert [found.key for found in bucket.objects.page_size(4)] == keys
        assert [found.key for found in bucket.objects.filter(Prefix="b/")] == keys[5:10]
        bucket.Object("copied").copy({"Bucket": bucket.name, "Key": "a/0"})
        assert bucket.Object("copied").get()["Body"].read() == b"a/0"
        pages = s3.get_paginator("list_objects_v2").paginate(
            Bucket=bucket.name, Delimiter="/", PaginationConfig={"PageSize": 2})
        assert [entry["Prefix"] for entry in pages.search("CommonPrefixes[]") if entry] == ["a/", "b/", "c/"]
        found = s3.list_buckets(Prefix="of-boto3-", MaxBuckets=1)
        assert ([one["Name"] for one in found["Buckets"]], found["Prefix"]) == ([bucket.name], "of-boto3-")
        bucket.objects.all().delete()
        lake.Object(bucket.name, keys[-1]).wait_until_not_exists()
        bucket.delete()
        bucket.wait_until_not_exists()
        assert bucket.name not in [one["Name"] for one in s3.list_buckets()["Buckets"]]
        """,
    )


@works("conditions")
def test_a_write_may_depend_on_what_is_there(gateway: Gateway) -> None:
    gateway.python(
        "boto3",
        """
        name = {"Bucket": "of-boto3", "Key": "once"}
        etag = s3.put_object(**name, Body=b"1", IfNoneMatch="*")["ETag"]
        for condition in ({"IfNoneMatch": "*"}, {"IfMatch": '"0"'}):
            try:
                s3.put_object(**name, Body=b"2", **condition)
            except s3.exceptions.ClientError as error:
                assert error.response["Error"]["Code"] == "PreconditionFailed"
            else:
                raise AssertionError(condition)
        new = s3.put_object(**name, Body=b"3", IfMatch=etag)["ETag"]
        assert s3.get_object(**name)["Body"].read() == b"3"
        for condition, code in (
            ({"IfMatch": etag}, "PreconditionFailed"),
            ({"IfMatchSize": 2}, "PreconditionFailed"),
            ({"Key": "never", "IfMatch": "*"}, "NoSuchKey"),
        ):
            try:
                s3.delete_object(**(name | condition))
            except s3.exceptions.ClientError as error:
                assert error.response["Error"]["Code"] == code
            else:
                raise AssertionError(condition)
        modified = s3.head_object(**name)["LastModified"]
        s3.delete_object(**name, IfMatch=new, IfMatchSize=1, IfMatchLastModifiedTime=modified)
        """,
    )


@works("presigned")
def test_presigned_urls_are_used_by_whoever_has_them(gateway: Gateway) -> None:
    gateway.python(
        "boto3",
        """
        import urllib.request
        name = {"Bucket": "of-boto3", "Key": "pre signed/é"}
        put = s3.generate_presigned_url("put_object", Params=name)
        urllib.request.urlopen(urllib.request.Request(put, data=b"sent", method="PUT")).close()
        with urllib.request.urlopen(s3.generate_presigned_url("get_object", Params=name)) as answer:
            assert answer.read() == b"sent"
        """,
    )


def test_forms_and_urls_of_version_2_are_refused_and_store_nothing(gateway: Gateway) -> None:
    gateway.python(
        "boto3",
        """
        import urllib.error, urllib.request

        def status(request):
            try:
                return urllib.request.urlopen(request).status
            except urllib.error.HTTPError as error:
                return error.status, error.read()

        form = s3.generate_presigned_post("of-boto3", "form")
        fields = "".join(f'--B\\r\\nContent-Disposition: form-data; name="{name}"\\r\\n\\r\\n{value}\\r\\n'
                         for name, value in [*form["fields"].items(), ("file", "content")])
        code, body = status(urllib.request.Request(form["url"], (fields + "--B--\\r\\n").encode(),
                            {"Content-Type": "multipart/form-data; boundary=B"}))
        assert code in (403, 501) and b"<Code>" in body, (code, body)
        old = boto3.client("s3", endpoint_url=s3.meta.endpoint_url, config=Config(signature_version="s3"))
        code, body = status(old.generate_presigned_url("get_object", Params={"Bucket": "of-boto3", "Key": "form"}))
        assert (code, b"AWS4-HMAC-SHA256" in body) == (400, True), (code, body)
        assert "Contents" not in s3.list_objects_v2(Bucket="of-boto3", Prefix="form")
        """,
    )


@works("virtual host")
def test_buckets_are_named_in_hosts_when_it_is_told_to(gateway: Gateway) -> None:
    gateway.python(
        "boto3",
        """
        virtual = Config(s3={"addressing_style": "virtual"})
        s3 = boto3.client("s3", endpoint_url=s3.meta.endpoint_url, config=virtual)
        urls = []
        s3.meta.events.register("before-send.s3", lambda request, **_: urls.append(request.url))
        s3.put_object(Bucket="of-boto3", Key="by/host@x", Body=b"host")
        assert s3.get_object(Bucket="of-boto3", Key="by/host@x")["Body"].read() == b"host"
        assert {url.split("?")[0] for url in urls} == {"http://of-boto3.lake.test/by/host%40x"}, urls
        """,
        by_host=True,
    )
