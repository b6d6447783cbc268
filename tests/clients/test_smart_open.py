"""smart_open: streams to and from objects."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "smart open",
    "smart_open",
    lacks=("list", "delete", "buckets", "copy", "metadata", "checksums", "conditions", "presigned", "virtual host"),
    also="streams, seeks",
)


@works("put", "get", "ranges", "multipart")
def test_streams_are_written_in_parts_and_read_from_anywhere(gateway: Gateway) -> None:
    gateway.python(
        "smart open",
        """
        import os
        content = os.urandom(12_000_000)
        with smart_open("s3://of-smart-open/big", "wb", transport_params={"min_part_size": 5 << 20}) as file:
            for start in range(0, len(content), 1_000_000):
                file.write(content[start : start + 1_000_000])
        with smart_open("s3://of-smart-open/big", "rb") as file:
            assert file.read() == content
            file.seek(4194300)
            assert file.read(11) == content[4194300:4194311]
        with smart_open("s3://of-smart-open/lines.txt.gz", "w") as file:
            file.write("one\\ntwo\\n")
        with smart_open("s3://of-smart-open/lines.txt.gz") as file:
            assert file.read() == "one\\ntwo\\n"
        """,
    )
