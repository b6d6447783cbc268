"""The AWS SDK for JavaScript, on Node.js."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("AWS SDK for JavaScript", "@aws-sdk/client-s3", lacks=("presigned", "virtual host"), also="")


@works("put", "get", "ranges", "list", "delete", "buckets", "multipart", "copy", "metadata", "checksums", "conditions")
def test_objects_are_put_read_listed_copied_and_removed(gateway: Gateway) -> None:
    gateway.node(
        "AWS SDK for JavaScript",
        """
        import assert from "node:assert";
        import { randomBytes } from "node:crypto";
        import * as S3 from "@aws-sdk/client-s3";
        const Bucket = "of-aws-sdk-for-javascript-2";
        await s3.send(new S3.CreateBucketCommand({ Bucket }));
        const content = randomBytes(5 << 20);
        const Metadata = { one: "1" };
        const ChecksumAlgorithm = "SHA256";
        await s3.send(new PutObjectCommand({ Bucket, Key: "big", Body: content, Metadata, ChecksumAlgorithm }));
        const got = await s3.send(new S3.GetObjectCommand({ Bucket, Key: "big", ChecksumMode: "ENABLED" }));
        assert.deepEqual(got.Metadata, Metadata);
        assert.ok(got.ChecksumSHA256);
        assert.ok(content.equals(Buffer.from(await got.Body.transformToByteArray())));
        const some = await s3.send(new S3.GetObjectCommand({ Bucket, Key: "big", Range: "bytes=4194300-4194310" }));
        assert.ok(content.subarray(4194300, 4194311).equals(Buffer.from(await some.Body.transformToByteArray())));
        await assert.rejects(s3.send(new PutObjectCommand({ Bucket, Key: "big", Body: "", IfNoneMatch: "*" })),
            { name: "PreconditionFailed" });
        const Key = "a b/ü";
        const { UploadId } = await s3.send(new S3.CreateMultipartUploadCommand({ Bucket, Key }));
        const Parts = [];
        for (const [index, Body] of [content, Buffer.from("last")].entries()) {
            const PartNumber = index + 1;
            const { ETag } = await s3.send(new S3.UploadPartCommand({ Bucket, Key, UploadId, PartNumber, Body }));
            Parts.push({ PartNumber, ETag });
        }
        await s3.send(new S3.CompleteMultipartUploadCommand({ Bucket, Key, UploadId, MultipartUpload: { Parts } }));
        await s3.send(new S3.CopyObjectCommand({ Bucket, Key: "copied", CopySource: encodeURI(`${Bucket}/${Key}`) }));
        const listed = await s3.send(new S3.ListObjectsV2Command({ Bucket }));
        assert.deepEqual(listed.Contents.map((entry) => [entry.Key, entry.Size]),
            [[Key, content.length + 4], ["big", content.length], ["copied", content.length + 4]]);
        const Objects = listed.Contents.map((entry) => ({ Key: entry.Key }));
        await s3.send(new S3.DeleteObjectsCommand({ Bucket, Delete: { Objects } }));
        await s3.send(new S3.DeleteBucketCommand({ Bucket }));
        """,
    )
