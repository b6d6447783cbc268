"""Counts of S3 traffic: what is counted where, and the sums over processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from gateway.http.head import parse_head
from gateway.http.messages import Request, Response
from gateway.s3.protocol.operation import Operation
from gateway.s3.protocol.targets import Target
from gateway.s3.telemetry.access_log import AccessLog
from gateway.s3.telemetry.traffic import BOUNDS_S, OPERATIONS, Connections, Snapshot, Traffic, TrafficCollector
from lakefs.errors import LocalFileError
from lakefs.limits import S3_ACCESS_LOG_BYTES_MAX
from tests.unit.support.inline_offload import InlineOffload


class NoBody:
    length = 0
    waits_since = 0.0

    async def receive_into(self, target: memoryview) -> int:
        return 0

    async def end(self) -> None:
        return


def request(operation: Operation | None) -> Request:
    head = parse_head(b"GET /b/k?X-Amz-Signature=feed HTTP/1.1\r\nHost: x\r\nUser-Agent: me\r\n\r\n")
    target = Target(operation, "b", "k", {}) if operation else None
    return Request(head, NoBody(), "10.0.0.1:1", target)


def counted(snapshot: Snapshot) -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(TrafficCollector(lambda: (snapshot, Connections(3, 2, 1))))
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_a_request_is_counted_once_in_each_figure() -> None:
    traffic = Traffic()
    traffic.answered(request(Operation.GET_OBJECT), Response(200, parts=[b"abc"]), 0.0, 0.0, 7, -1)
    traffic.answered(request(Operation.GET_OBJECT), Response(503, code="SlowDown"), 0.0, 0.0, 0, 0)
    traffic.answered(request(None), Response(403, code="AccessDenied"), 0.0, 0.0, 0, 0)
    traffic.malformed(Response(400, code="BadRequest"))
    found = counted(traffic._counts)
    assert found['lake_s3_requests_total{operation="GetObject",status="2xx"}'] == 1
    assert found['lake_s3_requests_total{operation="GetObject",status="5xx"}'] == 1
    assert found['lake_s3_requests_total{operation="none",status="4xx"}'] == 2
    assert found['lake_s3_refusals_total{code="SlowDown"}'] == 1
    assert (found["lake_s3_received_bytes_total"], found["lake_s3_sent_bytes_total"]) == (7, 3)
    assert found['lake_s3_request_seconds_bucket{le="+Inf",operation="GetObject"}'] == 2
    assert found['lake_s3_connections{state="idle"}'] == 2


def test_error_codes_are_bounded_however_many_there_are() -> None:
    traffic = Traffic()
    for number in range(1000):
        traffic.malformed(Response(400, code=f"Code{number}"))
    assert len(traffic._counts.errors) == 129
    assert sum(traffic._counts.errors.values()) == 1000


def test_processes_add_up() -> None:
    one, two = Traffic(), Traffic()
    one.answered(request(Operation.PUT_OBJECT), Response(200), 0.0, 0.0, 5, -1)
    two.answered(request(Operation.PUT_OBJECT), Response(404, code="NoSuchBucket"), 0.0, 0.0, 6, -1)
    both = counted(one._counts.plus(two._counts))
    assert both["lake_s3_received_bytes_total"] == 11
    assert both['lake_s3_request_seconds_count{operation="PutObject"}'] == 2
    assert both['lake_s3_refusals_total{code="NoSuchBucket"}'] == 1
    assert Connections(3, 2, 1).plus(Connections(1, 0, 1)) == Connections(4, 2, 2)


def test_every_operation_and_status_has_its_place() -> None:
    for operation in Operation:
        for status, shown in ((100, "1xx"), (200, "2xx"), (304, "3xx"), (404, "4xx"), (501, "501"), (503, "5xx")):
            traffic = Traffic()
            traffic.answered(request(operation), Response(status), 0.0, 0.0, 0, 0)
            name = f'lake_s3_requests_total{{operation="{operation.value}",status="{shown}"}}'
            assert counted(traffic._counts)[name] == 1
    assert len(Snapshot().times) == len(OPERATIONS) * (len(BOUNDS_S) + 1)


def test_an_answer_that_ended_early_is_told_apart() -> None:
    seen: list[tuple[int, bool]] = []

    async def stream(sender: object) -> None:
        return

    def observer(
        request: Request, response: Response, took: float, first: float, received: int, sent: int, cut: bool
    ) -> None:
        seen.append((sent, cut))

    traffic = Traffic(observer)
    traffic.answered(request(Operation.GET_OBJECT), Response(200, length=9, stream=stream), 0.0, 0.1, 0, 4)
    traffic.answered(request(Operation.GET_OBJECT), Response(200, length=9, stream=stream), 0.0, 0.1, 0, 9)
    assert seen == [(4, True), (9, False)]
    assert traffic._counts.cut_short == 1


def test_a_sample_of_the_log_has_each_error_of_the_server_and_no_more_of_what_is_not_offered(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "log"), 1000, InlineOffload())
    for status in (501, 500, 503, 501):
        log.answered(request(Operation.PUT_BUCKET_POLICY), Response(status), 0.1, 0.1, 0, 0, False)
    assert [line.partition(b'"status":')[2][:3] for line in log._lines] == [b"500", b"503"]


def test_what_a_log_cannot_hold_or_write_is_dropped_and_counted(tmp_path: Path) -> None:
    async def main() -> None:
        log = AccessLog(str(tmp_path / "log"), 1, InlineOffload())
        one = (request(Operation.GET_OBJECT), Response(200), 0.1, 0.1, 0, 0, False)
        log.answered(*one)
        line_bytes = log._bytes
        for _ in range(S3_ACCESS_LOG_BYTES_MAX // line_bytes + 10):
            log.answered(*one)
        assert log.lost >= 10
        kept = len(log._lines)
        await log._write()
        written = (tmp_path / "log").read_text()
        assert len(written.splitlines()) == kept
        assert "feed" not in written
        log._file = 10_000  # no such descriptor
        log.answered(*one)
        before = log.lost
        await log._write()
        assert log.lost == before + 1

    trio.run(main)
    with pytest.raises(LocalFileError, match="absent"):
        AccessLog(str(tmp_path / "absent" / "log"), 1, InlineOffload())
