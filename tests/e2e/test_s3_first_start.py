"""What a first start with S3 prints, and what it does when its port is taken."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from pathlib import Path

import boto3
from botocore.config import Config

from tests.e2e.s3_client import url_of
from tests.e2e.served import LAKE, Served, environment, lake, serving

PORT_0 = ("--s3", "127.0.0.1:0")
NO_KEY = "s3 key  none yet; make one with: lake key create"


def _key_of(served: Served) -> list[str]:
    """Access key and secret as printed; empty when none was."""
    return [line.split()[-1] for line in served.printed if re.match(r"(access|secret) key  \S+$", line)]


def test_the_first_start_prints_a_key_that_works_and_later_ones_print_none(folder: Path) -> None:
    with serving(folder, *PORT_0) as served:
        access_key, secret_key = _key_of(served)
        client = boto3.client(
            "s3",
            endpoint_url=url_of(served),
            region_name="us-east-1",
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=Config(retries={"max_attempts": 0}),
        )
        client.create_bucket(Bucket="mine")
        assert served.good("ls").lines == ["mine"]
        assert served.stop() == 0
        served.start()
        assert _key_of(served) == []
        assert NO_KEY not in served.printed
        served.good("key", "rm", access_key)
        assert served.stop() == 0
        served.start()
        assert _key_of(served) == []
        assert NO_KEY in served.printed


def test_without_s3_no_key_is_made(folder: Path) -> None:
    with serving(folder) as served:
        assert [line for line in served.printed if "key" in line] == []
        assert served.good("key", "ls").lines == []


def test_no_secret_goes_to_a_journal(folder: Path) -> None:
    ours, theirs = os.pipe()
    journal = os.fstat(theirs)
    command = [*LAKE, "serve", "--data", str(folder / "store"), "--socket", str(folder / "s")]
    with subprocess.Popen(
        [*command, "--admin", "off", *PORT_0],
        stdout=theirs,
        env=environment() | {"JOURNAL_STREAM": f"{journal.st_dev}:{journal.st_ino}"},
    ) as engine:
        os.close(theirs)
        printed = []
        with open(ours) as lines:
            for line in lines:
                printed.append(line.rstrip())
                if line == "ready\n":
                    break
            assert NO_KEY in printed
            assert [line for line in printed if "secret" in line] == []
            assert lake("key", "ls", server=f"unix:{folder}/s").lines == []
            engine.terminate()
            assert engine.wait(60) == 0


def test_a_taken_port_is_told_and_the_next_start_still_has_the_key(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        done = lake(
            "serve", "--data", folder / "store", "--socket", folder / "s", "--admin", "off", "--s3", taken
        )
    assert done.code == 71
    assert f"S3 port {taken} is taken" in done.err
    assert "--s3 HOST:PORT, or --s3 off" in done.err
    with serving(folder, *PORT_0) as served:
        assert len(_key_of(served)) == 2
