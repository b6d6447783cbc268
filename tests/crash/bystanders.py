"""Who else is there while writers write: a reader who knows what may be read, one who collects, one who scrubs.

Every content that a writer ever gives a name stands in its journal before the request is sent.  So whoever reads a
name and then looks into the journal finds what was read there, or the bytes are wrong.
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
        """Whether somebody ever meant these bytes for a name of this writer."""
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
    """Read names of all writers, through either face, until the engine is gone; wrong bytes are an error."""
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
    """One cycle of gc after the other until the engine is gone, the first and every other compacts to the last page."""
    try:
        with connect(address) as lake:
            for turn in count():
                lake.gc(compact=turn % 2 == 0)
    except OperationalError:
        return


def scrub_all_the_time(address: str) -> None:
    """One pass of scrub after the other until the engine is gone; nothing is ever found damaged."""
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
