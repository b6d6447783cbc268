"""A lake whose clients are served by several processes at one socket: the head that is free takes the next client."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

import lakefs
from lakefs.errors import EngineUnreachable
from tests.e2e.gateways import gateway
from tests.e2e.served import lake
from tests.e2e.test_lake_on_devices import ServedLake, eventually, processes, served

OPTIONS: Final = ("--protect", "2+1", "--accept-loss", "--heads", "2")
pytestmark = [pytest.mark.slow]


def heads_of(lake_: ServedLake) -> list[int]:
    """Return the processes of its heads."""
    return [pid for pid, arguments in processes() if "--head" in arguments and str(lake_.socket) in arguments]


def descriptors_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_clients_are_spread_over_heads_and_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]
    payloads = [random.Random(number).randbytes(300_000) for number in range(16)]
    with served(tmp_path, folders, *OPTIONS, "--native", "127.0.0.1:0") as lake_, ExitStack() as stack:
        lake_.good("bucket", "create", "bucket")
        heads = heads_of(lake_)
        assert len(heads) == 2
        before = [descriptors_of(head) for head in heads]
        clients = [stack.enter_context(lakefs.connect(lake_.server)) for _ in payloads]
        for number, (client, payload) in enumerate(zip(clients, payloads, strict=True)):
            client.put(f"bucket/{number}", payload)
        assert all(descriptors_of(head) > count for head, count in zip(heads, before, strict=True))
        for number, client in enumerate(clients):
            assert client.get(f"bucket/{(number + 7) % 16}") == payloads[(number + 7) % 16]
        tcp = next(line for line in lake_.printed if "tcp://" in line).split()[1]
        with lakefs.connect(tcp, token=(folders[0] / "native.token").read_text().strip()) as far:
            assert far.get("bucket/3") == payloads[3]

        failures: list[str] = []
        half_way = threading.Event()

        def go_on(client: lakefs.Lake, number: int) -> None:
            try:
                for round_ in range(16):
                    try:
                        client.put(f"bucket/{number}", payloads[(number + round_) % 16])
                    except EngineUnreachable:  # in flight at the head that was killed
                        client.put(f"bucket/{number}", payloads[(number + round_) % 16])
                    assert client.get(f"bucket/{number}") == payloads[(number + round_) % 16]
                    if round_ == 4:
                        half_way.set()
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(repr(error))
                half_way.set()

        threads = [threading.Thread(target=go_on, args=(client, number)) for number, client in enumerate(clients[:6])]
        for thread in threads:
            thread.start()
        half_way.wait()
        os.kill(heads[0], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert failures == []
        eventually(lambda: len(heads_of(lake_)) == 2 and heads[0] not in heads_of(lake_), "no new head")
        assert [each["folder"] for each in status(lake_)["folders"]] == [str(folder) for folder in folders]
    assert heads_of(lake_) == []
    assert not lake_.socket.exists()


def status(lake_: ServedLake) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lake_.good("status", "--json").out)
    return found


def test_clients_of_all_heads_are_counted_whichever_is_asked(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]
    with served(tmp_path, folders, *OPTIONS, "--admin", "127.0.0.1:0") as lake_, ExitStack() as stack:
        lake_.good("bucket", "create", "bucket")
        clients = [stack.enter_context(lakefs.connect(lake_.server)) for _ in range(8)]
        for number, client in enumerate(clients):
            client.put(f"bucket/{number}", b"1")

        def counted(client: lakefs.Lake) -> tuple[int, int]:
            found = client.status()
            by_head = [head["connections"] for head in found.get("heads", ()) if head["pid"] in heads_of(lake_)]
            return found["clients"]["connections"], len([count for count in by_head if 0 < count < 8])

        eventually(lambda: {counted(client) for client in clients} == {(8, 2)}, "a head knows only its own clients")
        eventually(lambda: metrics(lake_)["lake_connections"] == 8, "the metric has not all clients")
        told = lake_.good("status").text.splitlines()
        assert [line.split()[0] for line in told if "process" in line].count("head") == 3, "two, and that of S3"
        with gateway(lake_.server) as beside:
            eventually(
                lambda: (
                    {tuple(each["url"] for each in client.status()["gateways"]) for client in clients}
                    == {(beside.url,)}
                ),
                "a head knows only its own gateways",
            )


def metrics(lake_: ServedLake) -> dict[str, float]:
    """Return the metrics of the process that serves a lake, by their names with labels."""
    admin = next(line for line in lake_.printed if line.startswith("admin")).split()[1]
    with urllib.request.urlopen(f"{admin}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_metrics_have_scrub_and_quarantine_of_each_member_of_the_machine(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]
    with served(tmp_path, folders, "--protect", "2+1", "--accept-loss", "--admin", "127.0.0.1:0") as lake_:
        lake_.good("bucket", "create", "bucket")
        lake_.good("put", "-", "bucket/key", stdin=random.Random(1).randbytes(200_000))
        lake_.good("scrub")
        members = [member["id"] for member in status(lake_)["lake"]["members"]]

        def figures(name: str) -> list[float]:
            found = metrics(lake_)
            return [found.get(f'{name}{{member="{member}"}}', -1.0) for member in members]

        eventually(lambda: figures("lake_scrub_chunks_total") == [1.0] * 3, "the metrics have not each shard")
        assert figures("lake_quarantined_chunks") == [0.0] * 3
        found = status(lake_)
        assert (found["scrub"]["passes"], found["scrub"]["last_pass"]["chunks"]) == (1, 3)


def test_heads_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]
    with served(tmp_path, folders, *OPTIONS) as lake_:
        lake_.kill()
        eventually(lambda: not heads_of(lake_), "a head outlived its parent")
        eventually(lambda: not lake_.members(1, 2, 3), "a member outlived its parent")


@pytest.mark.parametrize("heads", ["1", "2"])
def test_a_lake_says_at_its_admin_port_that_it_is_ready_and_has_metrics(tmp_path: Path, heads: str) -> None:
    folders = [tmp_path / f"d{number}" for number in range(3)]
    options = ("--protect", "2+1", "--accept-loss", "--heads", heads, "--admin", "127.0.0.1:0")
    with served(tmp_path, folders, *options) as lake_:
        admin = next(line for line in lake_.printed if line.startswith("admin")).split()[1]
        told = {}
        for path in ("health", "ready", "metrics"):
            with urllib.request.urlopen(f"{admin}/{path}", timeout=30) as answer:
                told[path] = answer.read().decode()
        assert (told["health"], told["ready"]) == ("ok\n", "ready\n")
        assert {"lake_ready 1.0", "lake_members_serving 3.0"} <= {*told["metrics"].splitlines()}


def test_one_engine_has_no_heads(tmp_path: Path) -> None:
    refused = lake("serve", "--data", tmp_path / "d", "--socket", tmp_path / "s", "--heads", "2")
    assert refused.code == 78, refused
    assert "heads are of a lake: one engine serves all its clients in one process" in refused.err
