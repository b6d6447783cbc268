"""zarr arrays in obstore."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "zarr",
    "zarr",
    lacks=("buckets", "multipart", "copy", "metadata", "checksums", "conditions", "presigned", "virtual host"),
    also="sharded arrays, groups",
)


@works("put", "get", "ranges", "list", "delete")
def test_arrays_are_written_read_in_part_and_removed(gateway: Gateway) -> None:
    gateway.python(
        "zarr",
        """
        import numpy
        assert (array[123, :] == 7).all() and array[250:, 3].sum() == 350
        array[120:130, 40] = numpy.arange(10)
        assert zarr.open_array(arrays, path="a")[120:130, 40].tolist() == list(range(10))
        layout = {"shape": (1000, 1000), "chunks": (10, 10), "shards": (500, 500), "dtype": "f8"}
        sharded = zarr.create_array(arrays, name="s", **layout)
        sharded[:] = numpy.arange(1_000_000).reshape(1000, 1000)
        assert sharded[777, 33] == 777_033
        import asyncio
        asyncio.run(arrays.delete_dir("s"))
        assert zarr.open_array(arrays, path="a")[0, 0] == 7
        """,
    )
