"""A first start with S3: what it prints, and what it does when its port is taken."""

from __future__ import annotations

import configparser
import os
import re
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.e2e.s3_client import url_of
from tests.e2e.served import LAKE, Served, environment, lake, serving

PORT_0 = ("--s3", "127.0.0.1:0")
NO_KEY = "s3 key  none yet; make one with: lake key create"


def _key_of(served: Served) -> list[str]:
    """Return access key and secret of the file that was printed; empty when none was."""
    [*paths] = [line.removeprefix("secret key  in ") for line in served.printed if "secret key" in line]
    if not paths:
        return []
    found = configparser.ConfigParser()
    assert found.read(paths) == [str(served.folders[0] / "s3-first-key")]
    return [found["default"]["aws_access_key_id"], found["default"]["aws_secret_access_key"]]


def _client(served: Served, access_key: str, secret_key: str) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=url_of(served),
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=Config(retries={"max_attempts": 0}),
    )


def test_the_first_start_makes_a_key_that_works_and_later_ones_make_none(folder: Path) -> None:
    with serving(folder, *PORT_0) as served:
        access_key, secret_key = _key_of(served)
        _client(served, access_key, secret_key).create_bucket(Bucket="mine")
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


def test_a_secret_is_printed_on_a_terminal_only_and_else_in_a_file_of_its_owner(folder: Path) -> None:
    old = os.umask(0)
    try:
        with serving(folder, *PORT_0) as served:
            _, secret_key = _key_of(served)
            kept = served.folders[0] / "s3-first-key"
            assert stat.S_IMODE(kept.stat().st_mode) == 0o600
            assert secret_key not in "\n".join(served.printed)
    finally:
        os.umask(old)

    terminal, theirs = os.openpty()
    command = [*LAKE, "serve", "--data", str(folder / "seen"), "--socket", str(folder / "s"), "--admin", "off"]
    with subprocess.Popen([*command, *PORT_0], stdout=theirs, env=environment()) as engine:
        os.close(theirs)
        printed = b""
        while b"ready" not in printed:
            printed += os.read(terminal, 4096)
        engine.terminate()
        assert engine.wait(60) == 0
    os.close(terminal)
    assert re.search(rb"^secret key  \S{40}\r$", printed, re.MULTILINE), printed
    assert not (folder / "seen" / "s3-first-key").exists()


def test_a_file_in_the_place_of_the_secret_is_left_as_it_is_and_no_key_is_made(folder: Path) -> None:
    kept = Served(folder, started=False).folders[0] / "s3-first-key"
    kept.parent.mkdir(mode=0o700, parents=True)
    kept.write_text("of an earlier store")
    with serving(folder, *PORT_0) as served:
        assert NO_KEY in served.printed
        assert served.good("key", "ls").lines == []
    assert kept.read_text() == "of an earlier store"


def test_a_taken_port_is_told_and_the_next_start_still_has_the_key(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        data = Served(folder, started=False).data_options
        done = lake("serve", *data, "--socket", folder / "s", "--admin", "off", "--s3", taken)
    assert done.code == 71
    assert f"S3 port {taken} is taken" in done.err
    assert "--s3 HOST:PORT, or --s3 off" in done.err
    with serving(folder, *PORT_0) as served:
        assert len(_key_of(served)) == 2
