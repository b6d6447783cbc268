"""A lake whose names are in two shards, for commands and the mount: all works, but moves between buckets of both."""

from __future__ import annotations

import errno
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import trio

from engine.server.listener import Server
from lakefs.transport.streams import TrioNetwork
from tests.e2e.mount_rig import MountRig, mount_rig
from tests.e2e.served import LAKE, WAIT_S
from tests.shards_rig import sharded_lake

CONTENT = os.urandom(300_000)


@contextmanager
def served_shards(folder: Path) -> Iterator[str]:
    """Serve the head of a lake of two shards in a thread; yields its address."""
    began: queue.SimpleQueue[tuple[str, trio.lowlevel.TrioToken, trio.Event]] = queue.SimpleQueue()

    async def main() -> None:
        over = trio.Event()
        async with sharded_lake(2) as lake, trio.open_nursery() as nursery:
            server = Server(lake.head, TrioNetwork(), token="")
            address = await nursery.start(server.listen_and_serve, f"unix:{folder}/socket")
            began.put((address, trio.lowlevel.current_trio_token(), over))
            await over.wait()
            await server.drain(1)
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    address, token, over = began.get(timeout=WAIT_S)
    try:
        yield address
    finally:
        token.run_sync_soon(over.set)
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture
def rig() -> Iterator[MountRig]:
    """Commands and a mount point; buckets `one` and `two` are in different shards, `three` is with `one`."""
    with TemporaryDirectory(prefix="lake-") as folder, served_shards(Path(folder)) as address:
        with mount_rig(LAKE, address) as made:
            for bucket in ("one", "two", "three"):
                done = made.lake("bucket", "create", bucket)
                assert done.code == 0, done
            yield made


def test_mv_across_shards_says_to_copy_and_remove(rig: MountRig, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(CONTENT)
    assert rig.lake("put", tmp_path / "x", "one/x").code == 0
    done = rig.lake("mv", "one/x", "two/x")
    assert (done.code, done.out) == (73, b"")
    [line] = done.err.splitlines()
    assert line.startswith("lake: buckets 'one' and 'two' are in different parts of the lake's names")
    assert line.endswith("copy it, then remove it: lake cp, lake rm")
    assert rig.lake("cp", "one/x", "two/x").code == 0
    assert rig.lake("rm", "one/x").code == 0
    assert rig.lake("get", "two/x", tmp_path / "y").code == 0
    assert (tmp_path / "y").read_bytes() == CONTENT
    assert rig.lake("mv", "two/x", "two/y").code == 0
    assert [line.split()[-1] for line in rig.lake("ls").out.decode().splitlines()] == ["one", "three", "two"]
    status = rig.lake("status")
    assert status.code == 0, status
    assert b"names shard 1" in status.out


@pytest.mark.fuse
def test_a_rename_across_shards_is_exdev_and_mv_copies(rig: MountRig) -> None:
    rig.mount()
    one, two, three = (rig.place / bucket for bucket in ("one", "two", "three"))
    (one / "d").mkdir()
    (one / "d/x").write_bytes(CONTENT)
    (one / "y").write_bytes(b"here")
    for name in ("d", "y"):
        with pytest.raises(OSError) as refused:
            (one / name).rename(two / name)
        assert refused.value.errno == errno.EXDEV
    assert sorted(os.listdir(one)) == ["d", "y"]
    assert os.listdir(two) == []
    (one / "y").rename(three / "y")
    assert (three / "y").read_bytes() == b"here"
    assert rig.run("mv", one / "d", two / "d").code == 0
    assert (two / "d/x").read_bytes() == CONTENT
    assert os.listdir(one) == []
    shutil.rmtree(two / "d")
