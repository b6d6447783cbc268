"""The reports of a gateway's processes to their leader."""

from __future__ import annotations

import msgspec
import pytest
import trio
import trio.testing

from cli.serve.gateway_process import REPORT_BYTES_MAX, Report, receive_reports, send_reports
from gateway.s3.telemetry.traffic import Connections, Snapshot

REPORT = Report("away", Snapshot(bytes_in=7, errors={"SlowDown": 1}), Connections(3, 2, 1))


def _heard(*pieces: bytes) -> list[Report]:
    found: list[Report] = []

    async def main() -> None:
        ours, theirs = trio.testing.memory_stream_one_way_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive_reports, theirs, found.append)
            for piece in pieces:
                await ours.send_all(piece)
            await ours.aclose()

    trio.run(main)
    return found


def test_reports_are_heard_however_they_are_cut() -> None:
    line = msgspec.json.encode(REPORT) + b"\n"
    assert _heard(line + line[:7], line[7:]) == [REPORT, REPORT]
    assert _heard(*(line[at : at + 1] for at in range(len(line)))) == [REPORT]


@pytest.mark.parametrize("junk", [b"{}\n", b"x\n", b"\xff\n", b"1" * (REPORT_BYTES_MAX + 1)])
def test_who_sends_something_else_is_heard_no_more(junk: bytes) -> None:
    good = msgspec.json.encode(REPORT) + b"\n"
    assert _heard(good, junk, good)[1:] == []


def test_a_member_stops_when_its_leader_is_gone() -> None:
    async def main() -> None:
        ours, theirs = trio.socket.socketpair()
        gone = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_reports, theirs.detach(), lambda: REPORT, gone)
            assert (await ours.recv(65536)).endswith(b"\n")
            ours.close()
            await gone.wait()

    trio.run(main)
