"""`python -m bench.rados` without ceph: it says what to install, and its gateway and table are right beside a fake."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from bench import rados
from bench.peers import rados_cluster
from bench.peers.rados_gateway import Gateway, GatewayClient, RadosError
from bench.peers.rados_sides import LAKE, LONG, MIDDLE, RADOS, SHORT


class FakePool:
    """Objects in memory; what is started has ended."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def aio_write_full(self, name: str, content: bytes) -> Any:
        self.objects[name] = content
        return self._ended(0)

    def aio_read(
        self, name: str, length: int, offset: int, oncomplete: Callable[[object, bytes | None], object]
    ) -> Any:
        content = self.objects.get(name)
        ended = self._ended(-errno.ENOENT if content is None else 0)
        oncomplete(ended, None if content is None else content[offset : offset + length])
        return ended

    @staticmethod
    def _ended(status: int) -> Any:
        return SimpleNamespace(
            wait_for_complete=lambda: None, wait_for_complete_and_cb=lambda: None, get_return_value=lambda: status
        )


class FakeCluster:
    def __init__(self) -> None:
        self.pool = FakePool()
        self.is_latest = False

    def open_ioctx(self, name: str) -> FakePool:
        assert name == "bench"
        return self.pool

    def wait_for_latest_osdmap(self) -> None:
        self.is_latest = True

    def pg_command(self, group: str, command: str, body: bytes) -> tuple[int, bytes, str]:
        assert self.is_latest
        return 0, json.dumps({"state": "active+clean", "asked": group}).encode(), ""

    def mon_command(self, command: str, body: bytes) -> tuple[int, bytes, str]:
        if json.loads(command)["prefix"] == "osd stat":
            return 0, b'{"num_up_osds": 6}', ""
        return -errno.EINVAL, b"", "command not known"


@contextmanager
def gateway(path: Path) -> Iterator[tuple[GatewayClient, FakePool]]:
    cluster = FakeCluster()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            Gateway(cluster, connection).serve()

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        serving = threading.Thread(target=serve)
        serving.start()
        client = GatewayClient(path)
        try:
            yield client, cluster.pool
        finally:
            client.close()
            serving.join(10)
    assert not serving.is_alive()


@pytest.mark.parametrize("in_flight", [1, 3, 64])
def test_content_is_stored_under_its_hash_and_got_back(tmp_path: Path, in_flight: int) -> None:
    contents = [bytes([number]) * 5000 for number in range(10)]
    with gateway(tmp_path / "socket") as (client, pool):
        names = client.put_all(contents, in_flight)
        assert names == [blake3(content).digest() for content in contents]
        assert [pool.objects[name.hex()] for name in names] == contents
        target = memoryview(bytearray(5000))
        for count in range(1, len(names) + 1):
            client.get_all(names[:count], target, in_flight)
            assert target == contents[count - 1]


def test_wrong_bytes_and_missing_objects_are_errors(tmp_path: Path) -> None:
    with gateway(tmp_path / "socket") as (client, pool):
        [name] = client.put_all([b"right"], 1)
        pool.objects[name.hex()] = b"wrong"
        target = memoryview(bytearray(5))
        with pytest.raises(RadosError, match=f"status -{errno.EIO}"):
            client.get_all([name], target, 1)
        with pytest.raises(RadosError, match=f"status -{errno.ENOENT}"):
            client.get_all([bytes(32)], target, 1)


def test_commands_are_answered_or_say_why_not(tmp_path: Path) -> None:
    with gateway(tmp_path / "socket") as (client, _):
        assert client.command(prefix="osd stat") == {"num_up_osds": 6}
        assert client.command(prefix="query", pgid="1.a") == {"state": "active+clean", "asked": "1.a"}
        with pytest.raises(RadosError, match="command not known"):
            client.command(prefix="osd dance")


def test_without_ceph_the_command_is_skipped_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rados_cluster, "PROGRAMS", ("ceph-mon-of-nowhere",))
    assert rados.main(["--quick"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("bench.rados: skipped: not installed: ceph-mon-of-nowhere")
    assert "apt-get install" in said


def test_the_table_judges_the_ratio_of_medians() -> None:
    goals = rados.goals_of(rados.FULL)
    put, get = rados.cpu_row("put", LONG, rados.FULL), rados.cpu_row("get, first", SHORT, rados.FULL)
    found = {put: {LAKE: [9.0, 2.0, 3.0], RADOS: [5.0, 5.0, 1.0]}, get: {LAKE: [1.0], RADOS: [2.0]}}
    assert rados.table(found, goals).splitlines()[2:] == [
        f"| {put} | 3 ms (2 to 9) | 5 ms (1 to 5) | 0.60x | <= 0.7x | met |",
        f"| {get} | 1 ms | 2 ms | 0.50x |  |  |",
    ]
    found[put][LAKE] = [4.0]
    assert "| 0.80x | <= 0.7x | **missed** |" in rados.table(found, goals)


def test_each_goal_is_one_of_a_row_that_is_measured() -> None:
    measured = {rados.cpu_row(what, size, rados.FULL) for what in ("put", "get, first", "get, again") for size in SIZES}
    measured |= {row.name for row in (*rados.REBUILD, rados.SPACE)}
    assert set(rados.goals_of(rados.FULL)) <= measured


SIZES = (LONG, MIDDLE, SHORT)


def test_the_configuration_names_only_places_below_its_folder(tmp_path: Path) -> None:
    lines = rados_cluster.configuration(tmp_path, "a-cluster", "v2:127.0.0.1:1").splitlines()
    settings = dict(line.split(" = ", 1) for line in lines if " = " in line)
    places = [value for value in settings.values() if "/" in value and value != "0/0"]
    assert places
    assert all(value.startswith(str(tmp_path)) for value in places)
    assert settings["debug_osd"] == settings["debug_bluestore"] == "0/0"
