"""A writer of versions: puts, delete markers and removals of single versions in a bucket that keeps them all.

Its journal has one line before each request and one after its answer, with the version's id.  Afterwards all versions
that were acknowledged must be there, in their order and with their bytes, and no other but the one in doubt.
"""

from __future__ import annotations

import json
import os
import random
import re
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lakefs.errors import OperationalError
from tests.crash.s3_hand import S3Hand
from tests.crash.writer import content_of
from tests.e2e.s3_raw import Signer

BUCKET: Final = "kept"
KEYS: Final = ("one", "folder/two")
VERSIONS_MAX: Final = 6
_LISTED: Final = re.compile(
    rb"<(Version|DeleteMarker)><Key>([^<]*)</Key><VersionId>([^<]*)</VersionId>|"
    rb"<(Version|DeleteMarker)>.*?<Key>([^<]*)</Key>.*?<VersionId>([^<]*)</VersionId>",
    re.DOTALL,
)
Versions = list[tuple[str, str | None]]
"""Ids and labels of one key, the newest first; a delete marker has no label."""


@dataclass
class KnownVersions:
    """The contents of the journal."""

    state: dict[str, Versions] = field(default_factory=lambda: {key: [] for key in KEYS})
    doubt: dict[str, str | None] | None = None
    acknowledged_since: int = 0

    def expected(self, key: str, found: Versions) -> list[Versions]:
        """Return the versions that the key may have; one of these lists must be found."""
        sure = self.state[key]
        if self.doubt is None or self.doubt["key"] != key:
            return [sure]
        if self.doubt["do"] == "drop":
            return [sure, [version for version in sure if version[0] != self.doubt["id"]]]
        return [sure, *([[(found[0][0], self.doubt["label"]), *sure]] if found else [])]


def read_versions(journal: Path) -> KnownVersions:
    """Replay the journal; a torn last line never happened."""
    known = KnownVersions()
    for line in journal.read_text().splitlines(keepends=True) if journal.exists() else ():
        if not line.endswith("\n"):
            break
        entry = json.loads(line)
        if "state" in entry:
            known = KnownVersions({key: [(i, label) for i, label in v] for key, v in entry["state"].items()})
        elif "do" in entry:
            known.doubt = entry
        else:
            _acknowledge(known, entry["id"])
    return known


def _acknowledge(known: KnownVersions, version: str) -> None:
    assert known.doubt is not None
    key = known.doubt["key"]
    assert key is not None
    if known.doubt["do"] == "drop":
        known.state[key] = [found for found in known.state[key] if found[0] != known.doubt["id"]]
    else:
        known.state[key].insert(0, (version, known.doubt["label"]))
    known.doubt = None
    known.acknowledged_since += 1


def write_versions(signer: Signer, seed: str, journal_path: Path, told: int) -> None:
    """Work until the engine is gone; write a byte to `told` for each acknowledgement."""
    generator = random.Random(f"versions {seed}")
    known = read_versions(journal_path)
    hand = S3Hand(signer)
    with journal_path.open("ab", buffering=0) as journal:
        for number in range(1 << 30):
            key = generator.choice(KEYS)
            entry = _chosen(generator, known.state[key], key, f"versions {seed} {number}")
            journal.write(json.dumps(entry).encode() + b"\n")
            known.doubt = entry
            try:
                version = _do(hand, entry)
            except OperationalError:
                return
            journal.write(json.dumps({"id": version}).encode() + b"\n")
            _acknowledge(known, version)
            os.write(told, b".")


def _chosen(generator: random.Random, versions: Versions, key: str, label: str) -> dict[str, str | None]:
    if len(versions) >= VERSIONS_MAX or (versions and generator.random() < 0.2):
        return {"do": "drop", "key": key, "id": generator.choice(versions)[0]}
    marks = generator.random() < 0.2
    return {"do": "mark" if marks else "put", "key": key, "label": None if marks else label}


def _do(hand: S3Hand, entry: dict[str, str | None]) -> str:
    path = f"/{BUCKET}/{entry['key']}"
    if entry["do"] == "put":
        assert entry["label"] is not None
        hand.ask("PUT", path, content_of(entry["label"]))
    elif entry["do"] == "mark":
        hand.ask("DELETE", path)
    else:
        hand.ask("DELETE", f"{path}?versionId={entry['id']}")
    assert hand.version, f"the answer to {entry} names no version"
    return hand.version


def check_versions(signer: Signer, journal: Path, where: str) -> int:
    """Compare all with the journal; return the number of changes acknowledged since the last check."""
    known = read_versions(journal)
    with closing(S3Hand(signer)) as hand:
        _check_all(hand, known, where)
    with journal.open("a") as file:
        file.write("\n" if journal.stat().st_size and not journal.read_bytes().endswith(b"\n") else "")
        file.write(json.dumps({"state": known.state}) + "\n")
    return known.acknowledged_since


def _check_all(hand: S3Hand, known: KnownVersions, where: str) -> None:
    """Compare all versions with `known`, and note in it what was found."""
    listed: dict[str, list[tuple[str, bool]]] = {key: [] for key in KEYS}
    for match in _LISTED.finditer(hand.ask("GET", f"/{BUCKET}?versions=")):
        kind, key, version = (part for part in match.groups() if part is not None)
        listed[key.decode()].append((version.decode(), kind == b"DeleteMarker"))
    for key, versions in listed.items():
        labels = [label for _, label in known.state[key]]
        if known.doubt is not None:
            labels.append(known.doubt.get("label"))
        by_content = {content_of(label): label for label in labels if label is not None}
        found: Versions = []
        for version, is_marker in versions:
            content = b"" if is_marker else hand.ask("GET", f"/{BUCKET}/{key}?versionId={version}")
            assert is_marker or content in by_content, f"{where}: {key} {version} has bytes of nobody"
            found.append((version, None if is_marker else by_content[content]))
        allowed = known.expected(key, found)
        assert any(_alike(found, one) for one in allowed), f"{where}: {key} is {found}, not one of {allowed}"
        known.state[key] = found


def _alike(found: Versions, expected: Versions) -> bool:
    """Return whether ids, order and bytes are the same; labels may differ if both contents are empty."""
    return [version for version, _ in found] == [version for version, _ in expected] and all(
        one == other or (bool(one and other) and content_of(one or "") == content_of(other or ""))
        for (_, one), (_, other) in zip(found, expected, strict=True)
    )
