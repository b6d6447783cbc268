"""s3fs through fsspec, and pandas and pyarrow on top of it."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("s3fs and fsspec", "s3fs", also="pandas and pyarrow: Parquet, partitioned data sets")


@works(
    "put", "get", "ranges", "list", "delete", "buckets", "multipart", "copy", "metadata", "checksums",
    "presigned", "conditions",
)  # fmt: skip
def test_a_file_system_of_objects(gateway: Gateway) -> None:
    gateway.python(
        "s3fs and fsspec",
        """
        import os, urllib.request
        lake.mkdir("of-s3fs-2")
        content = os.urandom(12_000_000)
        with lake.open("of-s3fs-2/a/big", "wb", block_size=5 << 20) as file:
            for start in range(0, len(content), 1_000_000):
                file.write(content[start : start + 1_000_000])
        assert lake.info("of-s3fs-2/a/big")["ETag"].endswith('-2"')
        assert lake.cat_file("of-s3fs-2/a/big") == content
        assert lake.cat_file("of-s3fs-2/a/big", start=4194300, end=4194311) == content[4194300:4194311]
        with lake.open("of-s3fs-2/a/big", "rb") as file:
            file.seek(-7, 2)
            assert file.read() == content[-7:]
        lake.pipe_file("of-s3fs-2/a/small", b"small", ContentType="x/y", Metadata={"one": "1"},
            ChecksumAlgorithm="SHA256")
        assert lake.metadata("of-s3fs-2/a/small") == {"one": "1"}
        lake.setxattr("of-s3fs-2/a/small", two="2", copy_kwargs={"ContentType": "x/z"})
        assert lake.metadata("of-s3fs-2/a/small") == {"one": "1", "two": "2"}
        assert lake.info("of-s3fs-2/a/small")["ContentType"] == "x/z"
        try:
            lake.pipe_file("of-s3fs-2/a/small", b"other", mode="create")
        except OSError as error:
            assert "exists already" in str(error)
        else:
            raise AssertionError("written over")
        lake.copy("of-s3fs-2/a/big", "of-s3fs-2/b/big")
        lake.mv("of-s3fs-2/b/big", "of-s3fs-2/b/moved")
        assert lake.find("of-s3fs-2") == ["of-s3fs-2/a/big", "of-s3fs-2/a/small", "of-s3fs-2/b/moved"]
        assert sorted(lake.ls("of-s3fs-2")) == ["of-s3fs-2/a", "of-s3fs-2/b"]
        assert lake.glob("of-s3fs-2/*/big") == ["of-s3fs-2/a/big"]
        assert lake.isdir("of-s3fs-2/a") and not lake.exists("of-s3fs-2/b/big")
        lake.rm("of-s3fs-2", recursive=True)
        assert not lake.exists("of-s3fs-2/a/big")
        signed = fsspec.filesystem("s3", endpoint_url=lake.endpoint_url or os.environ["AWS_ENDPOINT_URL"],
            config_kwargs={"signature_version": "s3v4"})
        with urllib.request.urlopen(signed.sign("of-s3fs-and-fsspec/hello")) as answer:
            assert answer.read() == b"hello"
        """,
    )


@works("virtual host")
def test_buckets_are_named_in_hosts_when_it_is_told_to(gateway: Gateway) -> None:
    gateway.python(
        "s3fs and fsspec",
        """
        import os
        by_host = fsspec.filesystem("s3", endpoint_url="http://lake.test",
            config_kwargs={"s3": {"addressing_style": "virtual"}, "proxies": {"http": os.environ["http_proxy"]}})
        by_host.pipe("of-s3fs-and-fsspec/by@host", b"host")
        assert by_host.cat("of-s3fs-and-fsspec/by@host") == b"host"
        """,
        by_host=True,
    )


def test_tables_are_written_and_read_as_parquet(gateway: Gateway) -> None:
    gateway.python(
        "s3fs and fsspec",
        """
        import pandas
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq
        options = {"endpoint_url": lake.endpoint_url} if lake.endpoint_url else {}
        frame = pandas.DataFrame({"n": range(200_000), "part": [n % 3 for n in range(200_000)]})
        frame.to_parquet("s3://of-s3fs-and-fsspec/frame.parquet", storage_options=options)
        back = pandas.read_parquet("s3://of-s3fs-and-fsspec/frame.parquet", columns=["n"], storage_options=options)
        assert back["n"].sum() == frame["n"].sum()
        frame.to_csv("s3://of-s3fs-and-fsspec/frame.csv", index=False, storage_options=options)
        assert len(pandas.read_csv("s3://of-s3fs-and-fsspec/frame.csv", storage_options=options)) == 200_000
        table = pq.read_table("of-s3fs-and-fsspec/frame.parquet", filesystem=lake)
        pq.write_to_dataset(table, "of-s3fs-and-fsspec/parts", partition_cols=["part"], filesystem=lake)
        parts = ds.dataset("of-s3fs-and-fsspec/parts", filesystem=lake, partitioning="hive")
        assert parts.to_table(filter=ds.field("part") == 1, use_threads=False).num_rows == 66_667
        import os
        os._exit(0)  # pyarrow's threads, which are at this file system, end a process by SIGABRT now and then
        """,
    )
