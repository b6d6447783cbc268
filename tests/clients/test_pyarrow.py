"""pyarrow's own S3 file system."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("pyarrow", "pyarrow", lacks=("presigned", "conditions"), also="Parquet data sets")


@works("put", "get", "ranges", "list", "delete", "buckets", "multipart", "copy", "metadata", "checksums")
def test_files_and_parquet_data_sets(gateway: Gateway) -> None:
    gateway.python(
        "pyarrow",
        """
        import os
        import pyarrow
        import pyarrow.dataset as ds
        import pyarrow.parquet as pq
        allowed = fs.S3FileSystem(endpoint_override="127.0.0.1:9000".replace("127.0.0.1:9000",
            os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")), scheme="http", region="us-east-1",
            allow_bucket_creation=True, allow_bucket_deletion=True)
        allowed.create_dir("of-pyarrow-2/folder")
        content = os.urandom(22_000_000)
        with allowed.open_output_stream("of-pyarrow-2/big", metadata={"Content-Type": "x/y"}) as file:
            for start in range(0, len(content), 1_000_000):
                file.write(content[start : start + 1_000_000])
        with allowed.open_input_file("of-pyarrow-2/big") as file:
            assert dict(file.metadata())["Content-Type"] == b"x/y"
            assert file.read_at(11, 4194300) == content[4194300:4194311]
            assert file.read() == content
        allowed.copy_file("of-pyarrow-2/big", "of-pyarrow-2/copied")
        allowed.move("of-pyarrow-2/copied", "of-pyarrow-2/moved")
        found = allowed.get_file_info(fs.FileSelector("of-pyarrow-2", recursive=True))
        assert sorted((one.base_name, one.size) for one in found) == [
            ("big", 22_000_000), ("folder", None), ("moved", 22_000_000)], found
        table = pyarrow.table({"n": range(100_000), "part": [n % 3 for n in range(100_000)]})
        ds.write_dataset(table, "of-pyarrow-2/set", filesystem=allowed, format="parquet",
            partitioning=["part"], partitioning_flavor="hive")
        back = ds.dataset("of-pyarrow-2/set", filesystem=allowed, partitioning="hive")
        assert back.to_table(filter=ds.field("part") == 0).num_rows == 33_334
        allowed.delete_dir("of-pyarrow-2/set")
        allowed.delete_dir("of-pyarrow-2")
        assert allowed.get_file_info("of-pyarrow-2").type == fs.FileType.NotFound
        """,
    )


@works("virtual host")
def test_buckets_are_named_in_hosts_when_it_is_told_to(gateway: Gateway) -> None:
    gateway.python(
        "pyarrow",
        """
        import os
        host, _, port = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").partition(":")
        lake = fs.S3FileSystem(endpoint_override="lake.test", scheme="http", region="us-east-1",
            force_virtual_addressing=True, proxy_options={"scheme": "http", "host": host, "port": int(port)})
        with lake.open_output_stream("of-pyarrow/by@host") as file:
            file.write(b"host")
        assert lake.open_input_file("of-pyarrow/by@host").read() == b"host"
        """,
    )
