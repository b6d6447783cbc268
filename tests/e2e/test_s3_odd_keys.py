"""Odd keys that S3 allows: each is an ordinary name, over S3 and, where a path can have it, through the mount."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final
from urllib.parse import unquote

import pytest

from tests.e2e.mount_rig import mount_rig
from tests.e2e.s3_raw import Signer, encoded, signer_of
from tests.e2e.served import LAKE, Served, serving

ASCII: Final = [f"a{chr(byte)}b" for byte in range(1, 128)] + [chr(byte) for byte in range(33, 127)]
ODD: Final = [
    "..",
    ".",
    "...",
    "../../etc/passwd",
    "a/../b",
    "a/./b",
    "a//b",
    "//",
    "/",
    "/a",
    "a/",
    "a//",
    "%2e%2e/x",
    "%00",
    "%",
    "%25",
    "a+b c",
    "q?x=1&y=2#z",
    "\\..\\windows",
    "é",
    "e\u0301",
    "\u00a0\u2028\ufeff",
    "\x7f\x80\x9f",
    "\ufffe\uffff",
    "漢字/🚀",
    "\U0010ffff",
    "]]>&<\"'",
    "<Key>&amp;</Key>",
    "k" * 1024,
    "é" * 512,
    "n" * 255 + "/x",
    "n" * 256,
    "n" * 480,
    "n" * 480 + "/" + "m" * 481 + "/o",
    "con/aux.txt:stream",
    "null",
    "bucket",
]
XML_CARRIES: Final = re.compile("[^\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]*")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine with S3 on a port of its own."""
    with TemporaryDirectory(prefix="lake-") as path, serving(Path(path), "--s3", "127.0.0.1:0") as engine:
        yield engine


@pytest.fixture(scope="module")
def s3(served: Served) -> Signer:
    """A key that may do everything."""
    return signer_of(served)


def listed(s3: Signer, bucket: str, query: str = "") -> list[str]:
    """Return all keys, read in pages, in the order of the answers."""
    found: list[str] = []
    token = ""
    while True:
        # The signer sorts the parameters that it signs, not those that it sends.
        target = f"/{bucket}?encoding-type=url&list-type=2&max-keys=100{query}{token}"
        body = s3.ask("GET", target).body.decode()
        found += [unquote(key) for key in re.findall(r"<Contents><Key>([^<]*)</Key>", body)]
        more = re.search(r"<NextContinuationToken>([^<]*)<", body)
        if more is None:
            return found
        token = "&continuation-token=" + encoded(unescape(more[1])).replace("/", "%2F")


def test_every_key_is_put_got_copied_and_deleted_under_its_own_name(s3: Signer) -> None:
    keys = list(dict.fromkeys(ASCII + ODD))
    s3.ask("PUT", "/odd")
    s3.ask("PUT", "/copies")
    for number, key in enumerate(keys):
        assert s3.ask("PUT", f"/odd/{encoded(key)}", b"%d" % number).status == 200, key
    in_order = sorted(keys, key=str.encode)
    assert listed(s3, "odd") == in_order
    for number, key in enumerate(keys):
        assert s3.ask("GET", f"/odd/{encoded(key)}").body == b"%d" % number, key
        source = {"x-amz-copy-source": "/odd/" + encoded(key)}
        assert s3.ask("PUT", f"/copies/{encoded(key)}", b"", source).status == 200, key
    assert listed(s3, "copies") == in_order
    for key in keys:
        prefix = "&prefix=" + encoded(key).replace("/", "%2F")
        assert listed(s3, "odd", prefix) == [other for other in in_order if other.startswith(key)], key
    in_xml = [key for key in keys if XML_CARRIES.fullmatch(key)]
    for first in range(0, len(in_xml), 200):
        objects = "".join(f"<Object><Key>{xml(key)}</Key></Object>" for key in in_xml[first : first + 200])
        answer = s3.ask("POST", "/odd?delete=", f"<Delete>{objects}</Delete>".encode())
        assert (answer.status, answer.body.count(b"<Deleted>")) == (200, len(in_xml[first : first + 200]))
    left = [key for key in in_order if not XML_CARRIES.fullmatch(key)]
    assert listed(s3, "odd") == left
    for key in left:
        assert s3.ask("DELETE", f"/odd/{encoded(key)}").status == 204
    assert listed(s3, "odd") == []
    assert listed(s3, "copies") == in_order


def xml(key: str) -> str:
    """Return a key as XML, where a bare carriage return would be a line's end."""
    return key.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\r", "&#13;")


@pytest.mark.parametrize("key", [ODD[number] for number in range(0, len(ODD), 3)], ids=ascii)
def test_a_key_is_uploaded_to_in_parts(s3: Signer, key: str) -> None:
    s3.ask("PUT", "/parts")
    path = f"/parts/{encoded(key)}"
    upload = s3.ask("POST", f"{path}?uploads=").field("UploadId")
    etag = s3.ask("PUT", f"{path}?partNumber=1&uploadId={upload}", key.encode()).headers["etag"]
    uploads = s3.ask("GET", "/parts?encoding-type=url&uploads=").body.decode()
    assert [unquote(found) for found in re.findall(r"<Upload><Key>([^<]*)<", uploads)] == [key]
    part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
    assert s3.ask("POST", f"{path}?uploadId={upload}", body).status == 200
    assert s3.ask("GET", path).body == key.encode()


def test_a_key_of_1025_bytes_is_refused_everywhere(s3: Signer) -> None:
    s3.ask("PUT", "/odd")
    for key in ("k" * 1025, "é" * 512 + "k", "a/" * 512 + "k"):
        path = f"/odd/{encoded(key)}"
        for method, query, body in (
            ("PUT", "", b"x"),
            ("GET", "", b""),
            ("DELETE", "", b""),
            ("POST", "?uploads=", b""),
            ("PUT", "?tagging=", b"<Tagging><TagSet/></Tagging>"),
        ):
            answer = s3.ask(method, path + query, body)
            assert (answer.status, answer.code) == (400, "KeyTooLongError"), (method, query)
        source = {"x-amz-copy-source": "/odd/" + encoded(key)}
        assert s3.ask("PUT", "/odd/copy", b"", source).code == "KeyTooLongError"
    assert listed(s3, "odd") == []


@pytest.mark.fuse
def test_a_mount_shows_what_a_path_can_say_and_hides_the_rest(served: Served, s3: Signer) -> None:
    s3.ask("PUT", "/shown")
    shown = {
        "plain": b"1",
        "sp ace\ttab\nline": b"2",
        "back\\slash": b"3",
        "é/漢字/🚀": b"4",
        "deep/er/x": b"5",
        "n" * 255: b"6",
        "star*?[]": b"7",
        "-rf": b"8",
        "\x01\x7f": b"9",
    }
    hidden = ["..", "../up", "a/../b", "a/./b", "a//b", "//", "/lead", "n" * 256, "m" * 300 + "/x"]
    both = {"both": b"object", "both/in": b"below"}
    for key, content in {**shown, **dict.fromkeys(hidden, b"hidden"), **both, "folder/": b""}.items():
        assert s3.ask("PUT", f"/shown/{encoded(key)}", content).status == 200, key
    with mount_rig(LAKE, served.server) as rig:
        rig.mount()
        place = rig.place / "shown"
        names = sorted(os.listdir(place))
        tops = {key.split("/")[0] for key in shown} | {"both", "folder", "a"}
        assert names == sorted(tops)
        for key, content in shown.items():
            assert (place / key).read_bytes() == content, key
        assert os.listdir(place / "folder") == []
        assert (os.listdir(place / "both"), (place / "both").is_dir()) == (["in"], True)
        found = [Path(root) / name for root, _, files in os.walk(place) for name in files]
        assert len(found) == len(shown) + 1, "and all walks end"
        assert (place / "..").resolve() == rig.place.resolve()
        (place / "both" / "new").write_bytes(b"written")
        assert s3.ask("GET", "/shown/both/new").body == b"written"
        assert rig.lake("unmount", rig.place).code == 0
    for key in [*hidden, "both"]:
        assert s3.ask("GET", f"/shown/{encoded(key)}").body in (b"hidden", b"object"), key
