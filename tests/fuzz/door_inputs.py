"""The door's C under the sanitizers: builds `door_inputs.c`, and feeds it with requests that are changed at random.

python -m tests.fuzz.door_inputs --inputs 1000000 --seed 7
"""

from __future__ import annotations

import argparse
import hmac
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from hashlib import md5, sha256
from pathlib import Path
from typing import Final

from tests.sim.__main__ import say

_ROOT: Final = Path(__file__).parents[2]
_HERE: Final = Path(__file__).parent
_KEY: Final = b"\x07" + bytes(31)
_MD5: Final = b64encode(md5(bytes(4000), usedforsecurity=False).digest()).decode()
ANSWERED_MIN: Final = 50
"""At least one of so many inputs is answered, and of twice as many held, or the seeds are not known to the program."""


def _request(method: str = "GET", more: str = "", body: bytes = b"") -> bytes:
    """Return a request that is signed as door_inputs.c knows it: the scope is the day alone."""
    date = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + 300))
    hashed = sha256(body).hexdigest()
    signed = f"host:lake:9000\nx-amz-content-sha256:{hashed}\nx-amz-date:{date}\n"
    names = "host;x-amz-content-sha256;x-amz-date"
    target = "/bucket/key\n" if method == "PUT" else "/bucket/key"
    canonical = f"{method}\n{target}\n{signed}\n{names}\n{hashed}"
    text = f"AWS4-HMAC-SHA256\n{date}\n{date[:8]}\n{sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(_KEY, text.encode(), "sha256").hex()
    return (
        f"{method} /bucket/key HTTP/1.1\r\nHost: lake:9000\r\nx-amz-date: {date}\r\nx-amz-content-sha256: {hashed}\r\n"
        f"Authorization: AWS4-HMAC-SHA256 Credential=K, SignedHeaders={names}, Signature={signature}\r\n{more}\r\n"
    ).encode() + body


def _seeds() -> list[bytes]:
    """Return requests to change, signed now: a signature is good for a quarter of an hour."""
    return [
        _request(),
        _request("HEAD"),
        _request(more='Range: bytes=0-0\r\nUser-Agent: a"b\\c\r\n'),
        _request(more="x-amz-checksum-mode: ENABLED\r\nAccept: */*\r\nConnection: keep-alive\r\n"),
        b"GET /bucket/key HTTP/1.1\r\nHost: lake:9000\r\nRange: bytes=5-\r\n\r\n",
        _request("PUT", "Content-Length: 4\r\nUser-Agent: a\r\n", b"body"),
        _request("PUT", f"Content-Length: 4000\r\nContent-Type: x\r\nContent-MD5: {_MD5}\r\n", bytes(4000)),
    ]


def build(folder: Path) -> Path:
    """Return the program, built with the sanitizers in a folder.  CalledProcessError if it does not build."""
    made = folder / "door_inputs"
    sanitizers = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    include = f"-I{_ROOT / 'gateway/s3/door'}"
    source = str(_HERE / "door_inputs.c")
    subprocess.run(
        ["gcc", "-std=gnu11", "-O1", "-g", *sanitizers, include, source, "-lcrypto", "-o", str(made)], check=True
    )
    return made


def feed(program: Path, folder: Path, inputs: int, seed: int) -> str:
    """Return what is wrong, "" for nothing."""
    paths = []
    for number, content in enumerate(_seeds()):
        paths.append(folder / f"seed-{number}")
        paths[-1].write_bytes(content)
    done = subprocess.run([program, str(inputs), str(seed), *paths], capture_output=True, text=True)
    if done.returncode:
        return f"it ended with {done.returncode}\n{done.stderr[-4000:]}"
    answered, held = (int(word) for word in done.stdout.split() if word.isdigit())
    enough = answered >= inputs // ANSWERED_MIN and held >= inputs // (2 * ANSWERED_MIN)
    return "" if enough else f"of {inputs} inputs only {answered} were answered, and {held} held"


def main() -> int:
    """Feed the program; print the result as the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = feed(build(Path(folder)), Path(folder), asked.inputs, asked.seed)
    say(f"door: {asked.inputs} inputs, seed {asked.seed}: {wrong or 'nothing failed'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
