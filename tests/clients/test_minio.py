"""minio: the Python client."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("minio", "minio", lacks=("conditions", "virtual host"), also="composes objects")


@works("put", "get", "ranges", "list", "delete", "buckets", "multipart", "copy", "metadata", "checksums", "presigned")
def test_objects_of_any_size_are_put_composed_listed_and_removed(gateway: Gateway) -> None:
    gateway.python(
        "minio",
        """
        import datetime, io, urllib.request
        from minio.commonconfig import ComposeSource, CopySource
        from minio.deleteobjects import DeleteObject
        lake.make_bucket("of-minio-2")
        content = os.urandom(12_000_000)
        put = lake.put_object("of-minio-2", "a/big", io.BytesIO(content), -1, part_size=5 << 20, content_type="x/y",
            metadata={"one": "1"})
        found = lake.stat_object("of-minio-2", "a/big")
        assert (found.size, found.content_type, found.metadata["x-amz-meta-one"]) == (len(content), "x/y", "1")
        with lake.get_object("of-minio-2", "a/big") as answer:
            assert answer.read() == content
        with lake.get_object("of-minio-2", "a/big", offset=4194300, length=11) as answer:
            assert answer.read() == content[4194300:4194311]
        lake.copy_object("of-minio-2", "b/copied", CopySource("of-minio-2", "a/big"))
        lake.compose_object("of-minio-2", "b/composed", [ComposeSource("of-minio-2", "a/big")] * 2)
        assert lake.stat_object("of-minio-2", "b/composed").size == 2 * len(content)
        listed = [entry.object_name for entry in lake.list_objects("of-minio-2", recursive=True)]
        assert listed == ["a/big", "b/composed", "b/copied"]
        assert [entry.object_name for entry in lake.list_objects("of-minio-2")] == ["a/", "b/"]
        url = lake.presigned_put_object("of-minio-2", "sent", datetime.timedelta(minutes=1))
        urllib.request.urlopen(urllib.request.Request(url, data=b"sent", method="PUT")).close()
        url = lake.presigned_get_object("of-minio-2", "sent", datetime.timedelta(minutes=1))
        assert urllib.request.urlopen(url).read() == b"sent"
        assert list(lake.remove_objects("of-minio-2", [DeleteObject(key) for key in [*listed, "sent"]])) == []
        lake.remove_bucket("of-minio-2")
        assert not lake.bucket_exists("of-minio-2")
        """,
    )
