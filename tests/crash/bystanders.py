"""Clients beside the writers: one reads and checks what it read, one collects garbage, one scrubs.

A writer notes each content in its journal before it sends the request that binds it to a name.  So a reader that reads
a name and then looks into the journal must find there what it has read; otherwise the bytes are wrong.
"""

from __future__ import annotations

import hashlib
import json
import random
from itertools import count
from pathlib import Path
from typing import Final

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.errors import BucketNotFound, KeyNotFound, OperationalError
from tests.crash.s3_hand import S3Hand
from tests.crash.writer import content_of, names_of
from tests.e2e.s3_raw import Signer

SCRUB_BYTES_PER_S: Final = 16 << 20


class Known:
    """The digests of all contents that a writer's journal names, read on from where the last look ended."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._read_bytes = 0
        self._labels: set[str] = set()
        self._digests: set[bytes] = set()

    def allows(self, content: bytes) -> bool:
        """Return whether this writer's journal has these bytes as content of any name."""
        with self._journal.open("rb") as journal:
            journal.seek(self._read_bytes)
            new = journal.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.splitlines():
            after = json.loads(line).get("after", {}) if line else {}
            self._labels.update(label for label in after.values() if label)
        digest = _digest(content)
        while digest not in self._digests and self._labels:
            self._digests.add(_digest(content_of(self._labels.pop())))
        return digest in self._digests


def read_all_the_time(address: str, signer: Signer | None, folder: Path, writers: tuple[str, ...], seed: str) -> None:
    """Read names of all writers, through either face, until the engine is gone; fail on wrong bytes."""
    generator = random.Random(f"reader {seed}")
    known = {writer: Known(folder / f"{writer}.journal") for writer in writers}
    try:
        with connect(address) as lake:
            s3 = None if signer is None else S3Hand(signer)
            while True:
                writer = generator.choice(writers)
                name = generator.choice(names_of(writer))
                content = _read(lake, name) if s3 is None or generator.random() < 0.5 else s3.get(name)
                if content is not None:
                    assert known[writer].allows(bytes(content)), f"{name}: {len(content)} bytes of nobody"
    except OperationalError:
        return


def collect_all_the_time(address: str) -> None:
    """Run gc cycles until the engine is gone; the first and every other one compact to the last page."""
    try:
        with connect(address) as lake:
            for turn in count():
                lake.gc(compact=turn % 2 == 0)
    except OperationalError:
        return


def scrub_all_the_time(address: str) -> None:
    """Run scrub passes until the engine is gone; none may find damage."""
    try:
        with connect(address) as lake:
            while True:
                report = lake.scrub(for_s=1.0, rate_bytes_per_s=SCRUB_BYTES_PER_S)
                assert report["quarantined_chunks"] == 0, report
    except OperationalError:
        return


def _read(lake: Lake, name: str) -> bytes | None:
    try:
        return bytes(lake.get(name))
    except (BucketNotFound, KeyNotFound):
        return None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
