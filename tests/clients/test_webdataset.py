"""webdataset: shards of samples, streamed through the aws cli."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "webdataset",
    "webdataset",
    lacks=(
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
        "virtual host",
    ),
    also="shards written and streamed",
)


@works("put", "get")
def test_shards_are_written_and_streamed(gateway: Gateway) -> None:
    gateway.python(
        "webdataset",
        """
        for shard in range(2):
            with webdataset.TarWriter(f"pipe:aws s3 cp - s3://of-webdataset/shard-{shard:03}.tar") as writer:
                for sample in range(20):
                    writer.write({"__key__": f"{shard}-{sample:03}", "cls": sample, "bin": bytes([sample]) * 5000})
        samples = list(webdataset.WebDataset(url, shardshuffle=False).decode().to_tuple("cls", "bin"))
        assert samples == [(sample, bytes([sample]) * 5000) for sample in range(20)] * 2
        """,
    )
