"""One engine with S3, and the clients' programs run against it as their users run them.

Clients live in an environment of their own, `.venv-clients`, which `make clients` installs: their dependencies are none
of the product's.  A client that is missing fails its tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.clients.declared import ROOT
from tests.clients.page import snippet
from tests.e2e.s3_client import KEYS_ARE_FRESH_S, url_of
from tests.e2e.served import Served

CLIENTS: Final = ROOT / ".venv-clients"
LIMIT_S: Final = 300.0
"""Time limit of a client's program: one that takes longer hangs.  Nothing here is timed."""
DATED_NS: Final = 981_173_106_123_456_789
"""Some time in 2001, with a fraction."""
DOMAIN: Final = "lake.test"
"""Domain behind bucket names in virtual-host style.

It does not resolve: clients reach it as through a proxy, and that is the gateway itself.
"""


@dataclass(frozen=True)
class Gateway:
    """The engine's S3 address, an access key that may do everything, and a folder for what programs leave."""

    served: Served
    address: str
    access_key: str
    secret_key: str
    folder: Path

    @property
    def url(self) -> str:
        """The URL for `--endpoint-url` and the like."""
        return f"http://{self.address}"

    def python(self, client: str, body: str, *, by_host: bool = False, language: str = "python") -> str:
        """Run the client's snippet, then `body`, with the clients' Python; return what it printed.

        `by_host`: the endpoint is a host name, not an address, so that clients may name the bucket in it.
        """
        return self._finished(client, language, [str(CLIENTS / "bin/python"), "-c"], body, by_host)

    def shell(self, client: str, body: str, *, by_host: bool = False) -> str:
        """Run the client's snippet, then `body`, with bash, which stops at the first failure; return its output."""
        return self._finished(client, "sh", ["bash", "-euo", "pipefail", "-c"], body, by_host)

    def node(self, client: str, body: str) -> str:
        """Like `python`, but run by Node.js, as a module."""
        command = ["node", "--input-type=module", "-e"]
        folder = self.folder / bucket_of(client)
        folder.mkdir()
        (folder / "node_modules").symlink_to(CLIENTS / "node_modules")
        return self._finished(client, "js", command, body, by_host=False)

    def _finished(self, client: str, language: str, command: list[str], body: str, by_host: bool) -> str:
        text = snippet(client, language, DOMAIN if by_host else self.address, bucket_of(client))
        proxy = {"http_proxy": self.url, "AWS_ENDPOINT_URL": f"http://{DOMAIN}"} if by_host else {}
        assert (CLIENTS / "stamp").exists(), "the clients are not installed; run: make clients"
        folder = self.folder / bucket_of(client)
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            [*command, f"{text}\n{textwrap.dedent(body)}"],
            cwd=folder,
            env=self.environment() | proxy | {"HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{client} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def environment(self) -> dict[str, str]:
        """Return the variables that the page begins with, and none of the developer's own settings."""
        kept = {name: os.environ[name] for name in ("LANG", "TERM", "TMPDIR") if name in os.environ}
        return kept | {
            "PATH": f"{CLIENTS / 'bin'}:{os.environ['PATH']}",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }


def bucket_of(client: str) -> str:
    """Return the client's own bucket, used instead of the page's `models`."""
    return f"of-{client.lower().replace(' ', '-').replace('.', '-')}"


def dated_tree(gateway: Gateway, client: str) -> Path:
    """Make the folder `dated` in the client's own, of three files that were changed at `DATED_NS`."""
    tree = gateway.folder / bucket_of(client) / "dated"
    for name in ("a", "sub/b", "sub/empty"):
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"" if name.endswith("empty") else name.encode())
        os.utime(path, ns=(DATED_NS, DATED_NS))
    return tree


def gateway_of(served: Served, folder: Path) -> Gateway:
    """Return the engine's S3 face, with a new key."""
    key = json.loads(served.good("key", "create", "--json").text)
    time.sleep(KEYS_ARE_FRESH_S)
    address = url_of(served).removeprefix("http://")
    return Gateway(served, address, key["access_key"], key["secret_key"], folder)
