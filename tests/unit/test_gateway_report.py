"""What processes of a gateway tell their leader."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from cli.gateway_report import REPORT_BYTES_MAX, Report, receive_reports, send_reports


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
    line = b'{"not_ready":null,"figures":{"lake_a":1.0,"lake_b":{"x":2.0}}}\n'
    expected = Report(None, {"lake_a": 1.0, "lake_b": {"x": 2.0}})
    assert _heard(line + line[:7], line[7:]) == [expected, expected]
    assert _heard(*(line[at : at + 1] for at in range(len(line)))) == [expected]


@pytest.mark.parametrize("junk", [b"{}\n", b"x\n", b"\xff\n", b"1" * (REPORT_BYTES_MAX + 1)])
def test_who_sends_something_else_is_heard_no_more(junk: bytes) -> None:
    good = b'{"not_ready":"away","figures":{}}\n'
    assert _heard(good, junk, good)[1:] == []


def test_a_member_stops_when_its_leader_is_gone() -> None:
    async def main() -> None:
        ours, theirs = trio.socket.socketpair()
        gone = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_reports, theirs.detach(), lambda: Report(None, {}), gone)
            assert await ours.recv(100) == b'{"not_ready":null,"figures":{}}\n'
            ours.close()
            await gone.wait()

    trio.run(main)
