"""Names that heads know: `python -m bench.head_stamps [--heads N]`.

    get      4 KiB by a known name, without a request: at the head of a second machine, and at one engine
    s3       a signed GET of 4 KiB, repeated by the door of S3: at both
    change   one key is bound anew, one at a time: known to no head, and to all of N heads; then the heads are killed

For changes the names' own store and service run in this process, on a real disk with the local journal, and the heads
in a second one, at a Unix socket; each head reads the name anew before each change that it is to know.  The heads share
one loop, so each change waits until it has made all turns one after the other: CPU of both sides is counted, too.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import trio

import lakefs
from bench.harness.machine import machine
from bench.harness.machines import LakeMachine
from bench.harness.process import EngineProcess, run_lake
from bench.harness.s3_requests import Endpoint, Signer
from engine.head.head_stamps import HeadStamps
from engine.head.names_link import NamesLink, names_at
from engine.host.clock import SystemClock
from engine.host.local_disk import LocalDisk
from engine.process.embedded import EmbeddedEngine
from engine.requests.bind import BindGate
from engine.requests.table import NamesService
from engine.server.listener import Server
from engine.store.names_opening import open_names_store
from lakefs.host.offload import ThreadOffload
from lakefs.ids import EMPTY_BLOB, new_id16
from lakefs.transport.streams import TrioNetwork
from lakefs.wire import messages as m

HEADS: Final = 16
CHANGES: Final = 300
REST_S: Final = 0.003
GETS: Final = 20_000
S3_GETS: Final = 4000
S3: Final = "--s3", "127.0.0.1:0"
ROUNDS: Final = 5
NAME: Final = ("bench", "known")


# --- gets of a known name ------------------------------------------------------------------------------


def get_us(lake: lakefs.Lake, name: str) -> float:
    """Return the median time of a get that takes no request."""
    buffer = bytearray(4096)
    end = time.monotonic() + 30
    while lake.known.answered < 5:
        lake.get_into(name, buffer)
        time.sleep(0.02)
        if time.monotonic() > end:
            raise RuntimeError(f"{name} is not known")
    times: list[float] = []
    before = lake.known.answered
    for _ in range(GETS // 100):
        began = time.perf_counter()
        for _ in range(100):
            lake.get_into(name, buffer)
        times.append((time.perf_counter() - began) * 1e4)
    asked = GETS - (lake.known.answered - before)
    if asked > GETS // 100:
        raise RuntimeError(f"{asked} of {GETS} gets were asked for")
    return statistics.median(times)


def gets(folder: Path) -> None:
    """Print the time of a get at a head of a second machine, and at one engine, interleaved."""
    hosts = [f"127.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}.{number}" for number in (21, 22)]
    with ExitStack() as stack:
        first, second = (LakeMachine(folder / f"m{number}", host, 2, *S3) for number, host in enumerate(hosts))
        first.init("bench", "--protect", "1+1", "--accept-loss")
        stack.enter_context(first)
        second.join(first)
        stack.enter_context(second)
        engine = stack.enter_context(EngineProcess(folder / "engine", *S3))
        lakes = [stack.enter_context(lakefs.connect(each.address)) for each in (second, engine)]
        name, content = "/".join(NAME), os.urandom(4096)
        for lake in lakes:
            lake.create_bucket(NAME[0])
            lake.put(name, content)
        rounds = [[get_us(lake, name) for lake in lakes] for _ in range(ROUNDS)]
        requests = [signed(each, name) for each in (second, engine)]
        over_s3 = [[s3_us(*request) for request in requests] for _ in range(ROUNDS)]
    for title, figures in (("get 4 KiB by a known name", rounds), ("S3 GET 4 KiB at the door", over_s3)):
        head, one = (statistics.median(each) for each in zip(*figures, strict=True))
        print(f"{title}: head {head:.2f} us, one engine {one:.2f} us: {head / one:.2f}x")


def signed(engine: EngineProcess, name: str) -> tuple[Endpoint, bytes]:
    """Return where an engine serves S3, and a signed GET of an object there."""
    [url] = [line.split()[1] for line in engine.printed if line.startswith("s3 ")]
    key = json.loads(run_lake("--server", engine.address, "key", "create", "--json"))
    endpoint = Endpoint(int(url.rpartition(":")[2].rstrip("/")), key["access_key"], key["secret_key"])
    return endpoint, Signer(endpoint).request("GET", f"/{name}").head


def s3_us(endpoint: Endpoint, request: bytes) -> float:
    """Return the median time of a GET over one connection, which sends the same request again and again."""
    times: list[float] = []
    with socket.create_connection(("127.0.0.1", endpoint.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(S3_GETS):
            began = time.perf_counter()
            connection.sendall(request)
            answer = b""
            while (end := answer.find(b"\r\n\r\n")) < 0 or len(answer) < end + 4 + 4096:
                answer += connection.recv(1 << 16)
            times.append((time.perf_counter() - began) * 1e6)
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(answer[:200].decode(errors="replace"))
    return statistics.median(times)


# --- changes -------------------------------------------------------------------------------------------


async def be_heads(address: str, count: int) -> None:
    """Be so many heads; read the name at each of them when asked to by a byte on standard input."""
    async with trio.open_nursery() as nursery:
        heads = [HeadStamps() for _ in range(count)]
        links = [NamesLink(nursery, names_at(address), partial(sys.exit, 1)) for _ in heads]
        for head, link in zip(heads, links, strict=True):
            link.learn = head.learn
            nursery.start_soon(head.run, names_at(address))
        while not all(head.turns() for head in heads):  # noqa: ASYNC110 - heads are asked here as nowhere else
            await trio.sleep(0.01)
        for head, link in zip(heads, links, strict=True):
            await head.join(link)
        said = trio.lowlevel.FdStream(os.dup(1))
        async for each in trio.lowlevel.FdStream(os.dup(0)):
            for _ in each:
                for link in links:
                    await link.call(m.StatNames([NAME], stamps=True))
                await said.send_all(b".")


class Cost(NamedTuple):
    """The cost of a change: how long it took, and the CPU time of the names' loop and of the heads."""

    ms: float
    names_us: float
    heads_us: float


async def cost_of_change(client: EmbeddedEngine, heads: int) -> Cost:
    """Bind the name anew, at rest before and after it; `heads`: their process."""
    await trio.sleep(REST_S)
    cpu_s, heads_us = time.thread_time(), cpu_us(heads)
    ms = await change_ms(client)
    await trio.sleep(REST_S)
    return Cost(ms, (time.thread_time() - cpu_s) * 1e6, cpu_us(heads) - heads_us)


def cpu_us(pid: int) -> float:
    """Return the CPU time that the first thread of a process has had, by the scheduler."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e3


def print_costs(unknown: list[Cost], known: list[Cost], count: int) -> None:
    """Print what it costs that heads know the name: in the median, and in the fastest fifth of the changes."""
    for title, place in (("p50", 0.5), ("p20", 0.2)):
        none, all_ = (sorted(each.ms for each in costs)[int(place * CHANGES)] for costs in (unknown, known))
        text = f"known to no head {none:.2f} ms, to {count} heads {all_:.2f} ms: + {all_ - none:.2f} ms"
        print(f"a change, {title}: {text}")
    names, heads = (
        (sorted(each[side] for each in known)[CHANGES // 5] - sorted(each[side] for each in unknown)[CHANGES // 5])
        for side in (1, 2)
    )
    print(f"CPU for each head that turns: {names / count:.0f} us at the names, {heads / count:.0f} us in the head")


async def change_ms(client: EmbeddedEngine) -> float:
    """Bind the name anew; returns how long that took."""
    change = m.NameChange(*NAME, EMPTY_BLOB, m.ObjectAttributes(), create_bucket=True)
    began = time.perf_counter()
    await client.call(m.BindBlobs(m.Answered(0, 0), [change], [0], [1]))
    return (time.perf_counter() - began) * 1e3


@asynccontextmanager
async def names(folder: Path, socket: Path) -> AsyncIterator[EmbeddedEngine]:
    """Serve new names at a socket, and yield a client of them."""
    async with AsyncExitStack() as stack:
        offload = await stack.enter_async_context(ThreadOffload(4, "names"))
        opening = open_names_store(
            LocalDisk(folder), SystemClock(), offload, cluster_id=new_id16(), create=True, verify_index=False
        )
        service = NamesService(await stack.enter_async_context(opening), gate=BindGate())
        nursery = await stack.enter_async_context(trio.open_nursery())
        await nursery.start(Server(service, TrioNetwork(), token=None).listen_and_serve, f"unix:{socket}")
        client = EmbeddedEngine(service, descriptors=False)
        yield client
        await client.aclose()
        nursery.cancel_scope.cancel()


async def changes(folder: Path, count: int) -> None:
    """Print the time of a change that no head knows, that all know, and of those behind the death of the heads."""
    socket = folder / "names"
    async with names(folder / "store", socket) as client:
        await change_ms(client)
        command = [sys.executable, "-m", "bench.head_stamps", "--heads", str(count), "--be-heads", f"unix:{socket}"]
        heads = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert heads.stdin is not None, "a pipe"
        assert heads.stdout is not None, "a pipe"
        unknown: list[Cost] = []
        known: list[Cost] = []
        for _ in range(CHANGES):
            await heads.stdin.send_all(b".")
            await heads.stdout.receive_some(1)
            known.append(await cost_of_change(client, heads.pid))
            unknown.append(await cost_of_change(client, heads.pid))
        await heads.stdin.send_all(b".")
        await heads.stdout.receive_some(1)
        heads.send_signal(signal.SIGKILL)
        await heads.wait()
        killed = [await change_ms(client) for _ in range(2)]
    print_costs(unknown, known, count)
    print(f"the heads were killed: the next change {killed[0]:.0f} ms, the one behind it {killed[1]:.2f} ms")


def main() -> None:
    """Measure, or be the heads of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=HEADS)
    parser.add_argument("--be-heads", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_heads:
        trio.run(be_heads, arguments.be_heads, arguments.heads)
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        print(machine(Path(folder)))
        (Path(folder) / "changes").mkdir()
        trio.run(changes, Path(folder) / "changes", arguments.heads)
        gets(Path(folder) / "gets")


if __name__ == "__main__":
    main()
