"""tensorstore, with its own S3 driver."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "tensorstore",
    "tensorstore",
    lacks=("buckets", "multipart", "copy", "metadata", "checksums", "presigned", "virtual host"),
    also="zarr3, writes under conditions",
)


@works("put", "get", "ranges", "list", "delete", "conditions")
def test_arrays_are_written_read_in_part_listed_and_removed(gateway: Gateway) -> None:
    gateway.python(
        "tensorstore",
        """
        import numpy
        layout = {"shape": [300, 500], "data_type": "int32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [100, 100]}}}
        array = tensorstore.open({**spec("ts/a/"), "metadata": layout}, create=True).result()
        array.write(numpy.arange(150_000, dtype="int32").reshape(300, 500)).result()
        assert tensorstore.open(spec("ts/a/")).result()[123, 45].read().result() == 123 * 500 + 45
        store = tensorstore.KvStore.open(spec("ts/kv/")["kvstore"]).result()
        store.write(b"key", b"0123456789").result()
        first = store.read(b"key", byte_range=slice(3, 6)).result()
        assert first.value == b"345"
        old = store.write(b"key", b"new", if_equal=first.stamp.generation).result()
        assert old.generation != first.stamp.generation
        assert store.write(b"key", b"late", if_equal=first.stamp.generation).result().generation == b""
        assert store[b"key"] == b"new"
        assert store.list().result() == [b"key"]
        del store[b"key"]
        assert store.list().result() == []
        """,
    )
