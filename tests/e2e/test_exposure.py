"""The sentences of docs/security.md that no other test checks: which client can see what, on each face."""

from __future__ import annotations

import os
import re
import urllib.request
from pathlib import Path

import pytest
import structlog
import trio

from engine.process.embedded import EmbeddedEngine, open_lake
from engine.requests.table import Service
from engine.store.local_store import open_local_store
from lakefs.config import settings as config
from lakefs.errors import PermissionDenied
from lakefs.ids import data_chunk_id
from lakefs.wire import messages as m
from tests.e2e.served import Served, lake, serving
from tests.raw_client import Running, real
from tests.store_rig import PLAIN, ask

MINE = b"what I may read " * 100
THEIRS = b"what is of somebody else " * 100


async def _put(client: EmbeddedEngine, bucket: str, payload: bytes) -> None:
    change = m.NameChange(bucket, "key", b"", PLAIN, create_bucket=True)
    await ask(client, m.PutObjects([len(payload)], [change]), m.NameResults, payload)


def test_a_segments_descriptor_shows_all_that_lies_in_the_segment(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_local_store(tmp_path / "store") as store:
            client = EmbeddedEngine(Service(store))
            await _put(client, "mine", MINE)
            await _put(client, "theirs", THEIRS)
            asked = m.Locate([bytes(data_chunk_id(MINE))])
            [grant] = (await ask(client, asked, m.Located)).grants
            reply = await client.call(m.OpenSegments([grant.segment]))
            [descriptor] = reply.descriptors
            try:
                assert os.pread(descriptor, grant.stored_bytes, grant.offset) == MINE
                assert THEIRS in os.pread(descriptor, os.fstat(descriptor).st_size, 0)
            finally:
                os.close(descriptor)

    trio.run(main)


def test_contents_and_secret_keys_lie_in_the_store_as_they_are(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with open_lake(store) as lake:
        lake.put("bucket/key", MINE, create_bucket=True)
        secret = lake.create_access_key().secret_key.encode()
    segments = b"".join(path.read_bytes() for path in (store / "segments").iterdir())
    journal = b"".join(path.read_bytes() for path in (store / "journal").iterdir())
    assert MINE in segments
    assert secret in journal
    assert all(path.stat().st_mode & 0o077 == 0 for path in [store, *store.rglob("*")])


def test_what_others_may_open_is_warned_of_and_refused_when_strict(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    served = Served(folder, started=False)
    data = served.folders[0]
    data.mkdir(parents=True)
    token = data / "native.token"
    token.write_text("a token of an earlier start")
    for path, mode in ((data, 0o755), (token, 0o640), (folder, 0o777)):
        path.chmod(mode)
    with serving(folder):
        pass
    warned = [line.split("] ", 1)[1] for line in capfd.readouterr().err.splitlines() if " is open to " in line]
    assert warned == [
        f"the data folder {data} is open to others (mode 0755); run: chmod 700 {data}",
        f"the file {token} is open to its group (mode 0640); run: chmod 600 {token}",
        f"the socket's folder {folder} is open to others (mode 0777); run: chmod 750 {folder}",
    ]
    refused = lake("serve", *served.data_options, "--socket", folder / "s", "--strict-permissions")
    assert refused.code == 78, refused
    assert all(sentence in refused.err for sentence in warned), refused.err
    assert not (folder / "s").exists()
    for path, mode in ((data, 0o700), (token, 0o600), (folder, 0o1777)):
        path.chmod(mode)
    with serving(folder, "--strict-permissions") as strict:
        assert strict.good("ls").lines == []
    assert " is open to " not in capfd.readouterr().err


def test_every_address_is_a_loopback_one_or_off_until_told_otherwise() -> None:
    found = config.load(file="/dev/null", environ={"HOME": "/home/a"})
    assert found.native is None
    for address in (found.s3, found.admin):
        assert address is not None
        assert address.host == "127.0.0.1"
    assert found.socket_group == ""


def test_the_admin_port_tells_no_names_and_no_secrets(tmp_path: Path) -> None:
    with serving(tmp_path, "--admin", "127.0.0.1:0", "--native", "127.0.0.1:0") as served:
        served.good("put", "-", "hidden-bucket/hidden-key", stdin=MINE)
        secret = served.good("key", "create").text
        token = served.token()
        printed = "\n".join(served.printed)
        ports = re.findall(r"admin\S*\s+(?:http://)?(127\.0\.0\.1:\d+)", printed)
        assert ports, printed
        for path in ("health", "ready", "metrics"):
            with urllib.request.urlopen(f"http://{ports[0]}/{path}", timeout=30) as answer:
                told = answer.read().decode()
            assert told
            for hidden in ("hidden-bucket", "hidden-key", token, *re.findall(r"[A-Za-z0-9+/]{40}", secret)):
                assert hidden not in told, path
        assert token not in printed


def test_a_token_that_was_presented_is_in_no_log_and_no_representation() -> None:
    assert "presented" not in repr(m.Hello(1, "client", token="presented"))

    async def test(served: Running) -> None:
        with structlog.testing.capture_logs() as logged:
            async with served.stranger() as client:
                with pytest.raises(PermissionDenied):
                    await client.hello(m.Hello(1, "client", token="presented"))
        assert [event["event"] for event in logged] == ["hello_refused"]
        assert "presented" not in repr(logged)

    real("tcp://127.0.0.1:0", test, token="expected", trusted=False)
