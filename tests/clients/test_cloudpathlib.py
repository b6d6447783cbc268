"""cloudpathlib: objects as paths."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client(
    "cloudpathlib",
    "cloudpathlib",
    lacks=("ranges", "buckets", "multipart", "metadata", "checksums", "conditions", "presigned", "virtual host"),
    also="paths",
)


@works("put", "get", "list", "delete", "copy")
def test_paths_are_written_walked_renamed_and_removed(gateway: Gateway) -> None:
    gateway.python(
        "cloudpathlib",
        """
        assert path.read_text() == "hello"
        top = lake.CloudPath("s3://of-cloudpathlib")
        (top / "a" / "b.txt").write_bytes(b"b")
        (top / "a" / "c" / "d.txt").write_bytes(b"d")
        assert sorted(found.key for found in (top / "a").rglob("*.txt")) == ["a/b.txt", "a/c/d.txt"]
        assert sorted(found.name for found in (top / "a").iterdir()) == ["b.txt", "c"]
        assert (top / "a").is_dir() and (top / "a" / "b.txt").stat().st_size == 1
        (top / "a" / "b.txt").copy(top / "e.txt")
        (top / "e.txt").rename(top / "f.txt")
        assert (top / "f.txt").read_bytes() == b"b" and not (top / "e.txt").exists()
        (top / "a").rmtree()
        assert [found.name for found in sorted(top.iterdir())] == ["f.txt", "hello"]
        """,
    )
