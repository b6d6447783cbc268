"""aiobotocore: botocore's client for asyncio."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("aiobotocore", "aiobotocore", lacks=("virtual host",), also="fifty requests at once")


@works(
    "put",
    "get",
    "ranges",
    "list",
    "delete",
    "buckets",
    "multipart",
    "copy",
    "metadata",
    "checksums",
    "conditions",
    "presigned",
)
def test_many_requests_are_under_way_at_once(gateway: Gateway) -> None:
    gateway.python(
        "aiobotocore",
        """
        import os, urllib.request
        from aiobotocore.config import AioConfig
        from botocore.exceptions import ClientError

        async def main():
            config = AioConfig(signature_version="s3v4", max_pool_connections=50)
            async with get_session().create_client("s3", config=config) as s3:
                await s3.create_bucket(Bucket="of-aiobotocore-2")
                name = {"Bucket": "of-aiobotocore-2"}
                keys = [f"{number:03}" for number in range(50)]
                await asyncio.gather(*(s3.put_object(**name, Key=key, Body=key.encode() * 1000, Metadata={"key": key},
                    ChecksumAlgorithm="SHA256") for key in keys))

                async def read(key):
                    got = await s3.get_object(**name, Key=key, Range="bytes=3-5", ChecksumMode="ENABLED")
                    assert got["Metadata"] == {"key": key}
                    async with got["Body"] as stream:
                        return await stream.read()

                assert await asyncio.gather(*map(read, keys)) == [key.encode() for key in keys]
                upload = await s3.create_multipart_upload(**name, Key="big")
                of_upload = {**name, "Key": "big", "UploadId": upload["UploadId"]}
                parts = [os.urandom(5 << 20), os.urandom(5 << 20), b"last"]
                done = await asyncio.gather(*(s3.upload_part(**of_upload, PartNumber=number, Body=part)
                    for number, part in enumerate(parts, 1)))
                listed = [{"PartNumber": number, "ETag": one["ETag"]} for number, one in enumerate(done, 1)]
                await s3.complete_multipart_upload(**of_upload, MultipartUpload={"Parts": listed})
                await s3.copy_object(**name, Key="copied", CopySource="of-aiobotocore-2/big")
                assert await (await s3.get_object(**name, Key="copied"))["Body"].read() == b"".join(parts)
                try:
                    await s3.put_object(**name, Key="big", Body=b"", IfNoneMatch="*")
                except ClientError as error:
                    assert error.response["Error"]["Code"] == "PreconditionFailed"
                else:
                    raise AssertionError
                url = await s3.generate_presigned_url("get_object", {**name, "Key": "007"})
                assert urllib.request.urlopen(url).read() == b"007" * 1000
                found = [entry["Key"] async for page in s3.get_paginator("list_objects_v2").paginate(**name)
                    for entry in page["Contents"]]
                assert found == [*keys, "big", "copied"]
                await s3.delete_objects(**name, Delete={"Objects": [{"Key": key} for key in found]})
                await s3.delete_bucket(**name)

        asyncio.run(main())
        """,
    )
