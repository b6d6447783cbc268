"""S3 for an operator: the access log, and the figures of the admin port."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.e2e.gateways import gateway, new_key, s3_client
from tests.e2e.served import WAIT_S, lake, serving


def logged(path: Path, count: int) -> list[dict[str, Any]]:
    """Wait until a log has so many lines; return the first ones."""
    for _ in range(int(WAIT_S / 0.05)):
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        threading.Event().wait(0.05)
    raise AssertionError(f"the log has {len(lines)} lines, not {count}")


def figure(text: str, name: str) -> float:
    """Return one figure of the metrics; 0 when it is missing."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def until_figure(read: Callable[[], str], name: str, value: float) -> str:
    for _ in range(int(WAIT_S / 0.05)):
        text = read()
        if figure(text, name) == value:
            return text
        threading.Event().wait(0.05)
    raise AssertionError(f"{name} is {figure(text, name)}, not {value}")


def test_each_request_is_a_line_without_secrets_and_a_renamed_log_goes_on_in_a_new_file(folder: Path) -> None:
    log = folder / "access.log"
    with serving(folder) as served, gateway(served.server, "--s3-access-log", str(log)) as found:
        key = new_key(served)
        client = s3_client(found.url, key)
        client.create_bucket(Bucket="bkt")
        odd = 'a "quoted"\n{"event": "forged"} \u001b[31m'
        client.put_object(Bucket="bkt", Key=odd, Body=b"x" * 5000)
        presigned = client.generate_presigned_url("get_object", Params={"Bucket": "bkt", "Key": odd})
        client.get_object(Bucket="bkt", Key=odd)["Body"].read()
        with pytest.raises(ClientError):
            client.get_object(Bucket="bkt", Key="absent")
        with pytest.raises(ClientError):
            s3_client(found.url, (key[0], "wrong")).list_buckets()
        made, put, got, absent, unsigned = logged(log, 5)
        assert (made["operation"], made["status"], made["error"]) == ("CreateBucket", 200, "")
        assert (put["bucket"], put["key"], put["bytes_in"], put["bytes_out"]) == ("bkt", odd, 5000, 0)
        assert (got["operation"], got["bytes_out"], got["access_key"]) == ("GetObject", 5000, key[0])
        assert (absent["status"], absent["error"]) == (404, "NoSuchKey")
        assert (unsigned["status"], unsigned["error"], unsigned["access_key"]) == (403, "SignatureDoesNotMatch", "")
        for line in (made, put, got, absent, unsigned):
            assert re.fullmatch("[0-9A-F]{16}", line["request_id"])
            assert line["remote"].startswith("127.0.0.1:")
            assert "Boto3" in line["user_agent"]
            assert 0 < line["first_byte_ms"] <= line["total_ms"]
        signature = presigned.rpartition("X-Amz-Signature=")[2]
        assert key[1] not in log.read_text()
        assert signature not in log.read_text()
        log.rename(folder / "access.log.1")
        found.process.send_signal(signal.SIGHUP)
        for _ in range(200):
            if log.exists():
                break
            threading.Event().wait(0.05)
        client.head_object(Bucket="bkt", Key=odd)
        assert [line["operation"] for line in logged(log, 1)] == ["HeadObject"]


def test_a_sample_has_its_share_and_what_is_not_offered_is_no_error_of_ours(folder: Path) -> None:
    log = folder / "access.log"
    options = ("--s3", "127.0.0.1:0", "--s3-access-log", str(log), "--s3-access-log-sample", "1/10")
    with serving(folder, *options) as served:
        [url] = [line.split()[1] for line in served.printed if line.startswith("s3 ")]
        client = s3_client(url, new_key(served), attempts=3)
        client.list_buckets()
        for _ in range(39):
            client.list_buckets()
        with pytest.raises(ClientError):
            client.put_bucket_policy(Bucket="bkt", Policy="{}")
    lines = logged(log, 4)
    assert {line["status"] for line in lines} == {200}
    assert len(lines) <= 6


def test_a_log_that_cannot_be_opened_is_told_at_the_start(folder: Path) -> None:
    refused = lake(
        *("gateway", "--server", f"unix:{folder}/s", "--s3", "127.0.0.1:0", "--admin", "off"),
        *("--s3-access-log", "/nowhere/access.log"),
    )
    assert refused.code == 74
    assert "/nowhere/access.log" in refused.err


def test_the_figures_of_a_gateway_are_those_of_all_its_processes_and_survive_one_that_dies(folder: Path) -> None:
    with serving(folder) as served, gateway(served.server, "--processes", "2") as found:
        key = new_key(served)
        first = s3_client(found.url, key)
        first.create_bucket(Bucket="bkt")
        for number in range(20):  # each over a connection of its own, so that both processes have some
            client = s3_client(found.url, key, attempts=3)
            client.put_object(Bucket="bkt", Key=f"k{number}", Body=b"x" * 1000)
            assert client.get_object(Bucket="bkt", Key=f"k{number}")["Body"].read() == b"x" * 1000
            client.close()
        with pytest.raises(ClientError):
            first.get_object(Bucket="bkt", Key="absent")

        def read() -> str:
            return found.admin("/metrics")[1]

        puts = 'lake_s3_requests_total{operation="PutObject",status="2xx"}'
        until_figure(read, puts, 20)
        until_figure(read, 'lake_s3_refusals_total{code="NoSuchKey"}', 1)
        text = until_figure(read, 'lake_s3_request_seconds_count{operation="GetObject"}', 21)
        assert figure(text, 'lake_s3_requests_total{operation="GetObject",status="4xx"}') == 1
        assert figure(text, "lake_s3_sent_bytes_total") > 20_000
        assert figure(text, "lake_s3_received_bytes_total") >= 20_000
        assert len([line for line in text.splitlines() if line.startswith("lake_s3_")]) < 400
        os.kill(found.children()[0], signal.SIGKILL)
        text = until_figure(read, "lake_gateway_restarts_total", 1)
        assert figure(text, puts) == 20
        first.close()
        until_figure(read, 'lake_s3_connections{state="answering"}', 0)
