"""obstore: the object_store crate for Python."""

from __future__ import annotations

from tests.clients.declared import Client, works
from tests.clients.gateway import Gateway

CLIENT = Client("obstore", "obstore", lacks=("buckets",))


@works(
    "put", "get", "ranges", "list", "delete", "multipart", "copy", "metadata", "checksums", "conditions", "presigned"
)  # fmt: skip
def test_objects_are_put_read_listed_copied_and_signed_for(gateway: Gateway) -> None:
    gateway.python(
        "obstore",
        """
        import datetime, os, urllib.request
        from obstore.exceptions import AlreadyExistsError, PreconditionError
        content = os.urandom(12_000_000)
        obstore.put(store, "a/big", content, chunk_size=5 << 20, attributes={"Content-Type": "x/y", "one": "1"})
        got = obstore.get(store, "a/big")
        assert got.attributes == {"Content-Type": "x/y", "one": "1"}, got.attributes
        assert bytes(got.bytes()) == content
        assert bytes(obstore.get_range(store, "a/big", start=4194300, length=11)) == content[4194300:4194311]
        some = obstore.get_ranges(store, "a/big", starts=[0, 9_000_000], lengths=[5, 7])
        assert [bytes(part) for part in some] == [content[:5], content[9_000_000:9_000_007]]
        summed = S3Store("of-obstore", endpoint=os.environ["AWS_ENDPOINT_URL"], region="us-east-1",
            checksum_algorithm="SHA256", client_options={"allow_http": True})
        obstore.put(summed, "a/summed", content[:100], use_multipart=False)
        assert bytes(obstore.get(store, "a/summed").bytes()) == content[:100]
        first = obstore.put(store, "a/once", b"1", mode="create")
        for mode, error in (("create", AlreadyExistsError), ({"e_tag": '"0"'}, PreconditionError)):
            try:
                obstore.put(store, "a/once", b"2", mode=mode)
            except error:
                pass
            else:
                raise AssertionError(mode)
        obstore.put(store, "a/once", b"3", mode={"e_tag": first["e_tag"]})
        obstore.copy(store, "a/big", "b/copied")
        obstore.rename(store, "b/copied", "b/moved")
        listed = [entry["path"] for page in obstore.list(store, chunk_size=2) for entry in page]
        assert listed == ["a/big", "a/once", "a/summed", "b/moved", "hello"], listed
        assert obstore.list_with_delimiter(store)["common_prefixes"] == ["a", "b"]
        url = obstore.sign(store, "GET", "a/once", datetime.timedelta(minutes=1))
        with urllib.request.urlopen(url) as answer:
            assert answer.read() == b"3"
        obstore.delete(store, listed)
        assert list(obstore.list(store)) == []
        """,
    )


@works("virtual host")
def test_buckets_are_named_in_hosts_when_it_is_told_to(gateway: Gateway) -> None:
    gateway.python(
        "obstore",
        """
        import os
        options = {"allow_http": True, "proxy_url": os.environ["AWS_ENDPOINT_URL"]}
        by_host = S3Store("of-obstore", endpoint="http://of-obstore.lake.test", region="us-east-1",
            virtual_hosted_style_request=True, client_options=options)
        obstore.put(by_host, "by@host", b"host")
        assert bytes(obstore.get(by_host, "by@host").bytes()) == b"host"
        assert obstore.head(store, "by@host")["size"] == 4
        """,
    )
