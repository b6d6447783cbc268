"""Real `lake gateway` processes in front of a `Served` engine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from tests.e2e.served import LAKE, WAIT_S, Served, environment, started_warm


class Gateway:
    """One `lake gateway`, of one process or several."""

    def __init__(
        self,
        engine: str,
        *options: str,
        token: str = "",
        stderr: Path | None = None,
        program: Sequence[str] = tuple(LAKE),
    ) -> None:
        """`program`: the command that is `lake`."""
        command = [*program, "gateway", "--server", engine, "--admin", "127.0.0.1:0"]
        if "--s3" not in options:
            command += ["--s3", "127.0.0.1:0"]
        with open(stderr or os.devnull, "wb") as log:
            variables = environment() | ({"LAKE_TOKEN": token} if token else {})
            self.process = started_warm([*command, *options], variables, errors=log.fileno() if stderr else 2)
        assert self.process.stdout is not None
        self.printed: list[str] = []
        for line in self.process.stdout:
            self.printed.append(line.rstrip("\n"))
            if line == "ready\n":
                return
        raise AssertionError(f"the gateway ended with {self.process.wait()}: {self.printed}")

    def printed_value(self, name: str) -> str:
        """Return the URL that was printed after a name."""
        [line] = [line for line in self.printed if line.split()[0] == name]
        return line.split()[1]

    @property
    def url(self) -> str:
        """The URL for S3 clients."""
        return self.printed_value("s3")

    def admin(self, path: str) -> tuple[int, str]:
        """Send one request to the admin port; return status and text."""
        try:
            with urllib.request.urlopen(self.printed_value("admin") + path, timeout=WAIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def children(self) -> list[int]:
        """Return the process ids of the members of a team."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]

    def stop(self) -> int:
        """Send SIGTERM; return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Wait until it has ended; return the exit code."""
        assert self.process.stdout is not None
        self.process.stdout.read()
        self.process.stdout.close()
        return self.process.wait(WAIT_S)


@contextmanager
def gateway(
    engine: str, *options: str, token: str = "", stderr: Path | None = None, program: Sequence[str] = tuple(LAKE)
) -> Iterator[Gateway]:
    """Run a gateway for the block; it must stop cleanly at the end unless the test stopped it."""
    started = Gateway(engine, *options, token=token, stderr=stderr, program=program)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            code = started.stop()
            assert code == 0, code


def new_key(served: Served) -> tuple[str, str]:
    """Make an access key and its secret, before the gateway starts, so that it knows the key."""
    key = json.loads(served.good("key", "create", "--json").text)
    return key["access_key"], key["secret_key"]


def s3_client(url: str, key: tuple[str, str], *, attempts: int = 1, verify: Any = None) -> Any:
    """Make a boto3 client; `attempts` is the number of all tries, boto3's own default is 5."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=key[0],
        aws_secret_access_key=key[1],
        verify=verify,
        config=Config(
            retries={"total_max_attempts": attempts, "mode": "standard"},
            signature_version="s3v4",
            connect_timeout=10,
            read_timeout=30,
        ),
    )


class SlowDownload:
    """A GET whose answer is read only as far as the test wants."""

    def __init__(self, client: Any, bucket: str, key: str) -> None:
        url = urlsplit(client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key}))
        assert url.hostname is not None
        self._socket = socket.create_connection((url.hostname, url.port or 80), timeout=WAIT_S)
        request = f"GET {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n"
        self._socket.sendall(request.encode())
        self._file = self._socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        self.length = 0
        while (line := self._file.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                self.length = int(value)

    def rest(self) -> str:
        """Read the rest of the body; return the SHA-256 of all of it."""
        digest = hashlib.sha256()
        left = self.length
        while left and (piece := self._file.read(min(left, 1 << 20))):
            digest.update(piece)
            left -= len(piece)
        self._file.close()
        self._socket.close()
        assert left == 0, f"{left} bytes are missing"
        return digest.hexdigest()
