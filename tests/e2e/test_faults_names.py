"""Names that do not exist, and names that cannot exist: refused, with the name, through every client."""

from __future__ import annotations

import os
import subprocess

import msgspec
import pytest

from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.connect import connect
from lakefs.errors import InvalidName, KeyNotFound, LakeError, ProtocolError
from lakefs.wire import messages as m
from tests.e2e.served import LAKE, ROOT, Finished, Served, environment

pytestmark = pytest.mark.thorough


def raw(served: Served, *args: bytes, stdin: bytes = b"") -> Finished:
    """Run a command with arguments that need not be text."""
    done = subprocess.run([*LAKE, *args], env=environment(served.server), cwd=ROOT, input=stdin, capture_output=True)
    return Finished(done.returncode, done.stdout, done.stderr.decode(errors="backslashreplace"))


def test_unknown_buckets_and_keys_are_named_by_every_command(served: Served) -> None:
    served.good("bucket", "create", "known")
    for command in (["cat"], ["stat"], ["rm"], ["ls"]):
        bucket = served(*command, "unknown/key")
        assert bucket.code == 66, bucket
        assert "unknown" in bucket.err
    for command in (["get", "known/nokey", "-"], ["mv", "known/nokey", "known/x"], ["rm", "known/nokey"]):
        key = served(*command)
        assert key.code == 66, key
        assert "known/nokey" in key.err
    assert served("put", "-", "unknown/x", "--no-create", stdin=b"").code == 66
    assert served("bucket", "rm", "unknown").code == 66
    assert "lake bucket create unknown" in served("cat", "unknown/x").err


@pytest.mark.parametrize(
    "key", [b"bad/\xff\xfe", b"bad/" + b"\xc3\xa9" * 2048, b"bad/" + b"k" * 4096], ids=["not UTF-8", "2048", "4096"]
)
def test_keys_that_cannot_be_are_refused_and_store_nothing(served: Served, key: bytes) -> None:
    served.good("put", "-", "bad/good", stdin=b"good")
    for args in ((b"put", b"-", key), (b"mv", b"bad/good", key), (b"cp", b"bad/good", key)):
        done = raw(served, *args, stdin=b"x")
        assert done.code == 2, done
        assert "UTF-8" in done.err
    for command in (b"cat", b"rm"):
        done = raw(served, command, key)
        assert done.code in (2, 66), done  # 66: a name that cannot exist does not exist
    assert served.good("ls", "bad").lines == ["good"]


def test_a_key_of_4095_bytes_is_accepted_in_any_script(served: Served) -> None:
    keys = ["k" * 4095, "é" * 2047, "\U0001f600" * 1023, "d/" * 2046 + "xx"]
    with connect(served.server) as client:
        for key in keys:
            client.put(f"long/{key}", key.encode(), create_bucket=True)
        assert {entry.key for entry in client.ls("long/")} == set(keys)
        for key in keys:
            assert client.get(f"long/{key}") == key.encode()
    assert served.good("cat", f"long/{keys[1]}").out == keys[1].encode()


@pytest.mark.parametrize("key", ["with\0nul", "\0", "a/\0/b", "half \ud800 pair"])
def test_nul_and_half_characters_are_refused(served: Served, key: str) -> None:
    with connect(served.server) as client:
        client.put("nul/a", b"there", create_bucket=True)
        for attempt in (
            lambda: client.put(f"nul/{key}", b"x"),
            lambda: client.put_many([(f"nul/{key}", b"x")]),
            lambda: client.move("nul/a", f"nul/{key}"),
        ):
            with pytest.raises(InvalidName) as caught:
                attempt()
            assert caught.value.message.isprintable()
        with pytest.raises((KeyNotFound, InvalidName)):
            client.get(f"nul/{key}")
        assert [entry.key for entry in client.ls("nul/")] == ["a"]


@pytest.mark.parametrize("bucket", ["", "-", "a" * 64, "A B", "..", "b\0", "b/c"])
def test_bucket_names_that_cannot_be_are_refused(served: Served, bucket: str) -> None:
    with connect(served.server) as client:
        with pytest.raises(LakeError) as caught:
            client.create_bucket(bucket)
        assert isinstance(caught.value, InvalidName), caught.value
        assert bucket not in [found.name for found in client.buckets()]


def test_text_that_is_no_text_on_the_wire_ends_that_request_alone(served: Served) -> None:
    """A client sends a key of bytes that are not UTF-8 in a msgpack string."""
    packed = msgspec.msgpack.encode([[["wire", "key"]]])
    spoilt = packed.replace(b"key", b"\xff\xfe\xfd")

    class Spoilt(m.Request, frozen=True):
        OP = m.StatNames.OP
        REPLY = m.NameResults
        names: msgspec.Raw = msgspec.Raw(spoilt[1:])

    with connect_blocking(served.server) as engine:
        with pytest.raises(ProtocolError, match="StatNames"):
            engine.call(Spoilt())
        assert isinstance(engine.call(m.Ping()).message, m.Done)


def test_names_of_files_that_are_not_utf8_are_refused_one_by_one(served: Served, tmp_path: os.PathLike[str]) -> None:
    folder = os.fsencode(tmp_path)
    for name in (b"good", b"bad\xff", b"line\nbreak", b"also good"):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(name)
    done = raw(served, b"put", b"-r", folder, b"names/")
    assert done.code == 2, done
    assert "UTF-8" in done.err
    assert "\\xff" in done.err
    with connect(served.server) as client:
        assert [entry.key for entry in client.ls("names/")] == ["also good", "good", "line\nbreak"]
    given = raw(served, b"put", os.path.join(folder, b"bad\xff"), b"names/renamed")
    assert given.code == 0, given
    assert served.good("cat", "names/renamed").out == b"bad\xff"
    with pytest.raises(KeyNotFound), connect(served.server) as client:
        client.get("names/bad")
