"""Compares the names and contents of a store with the journals of its writers."""

from __future__ import annotations

from pathlib import Path

from lakefs.client.connect import connect
from tests.crash.writer import State, content_of, names_of, read_journal, resolve


def check_writer(server: str, journal: Path, writer: str, where: str) -> int:
    """Check a writer's names against its journal; return the number of changes acknowledged since the last check."""
    if not journal.exists():
        return 0
    known = read_journal(journal)
    labels = set(known.state.values()) | set((known.doubt.after if known.doubt else {}).values())
    by_content = {content_of(label): label for label in labels if label}
    found: State = {}
    with connect(server) as client:
        for name in names_of(writer):
            if not client.exists(name):
                found[name] = None
                continue
            content = bytes(client.get(name))
            assert content in by_content, f"{where}: {name} has {len(content)} bytes that nobody wrote there"
            found[name] = by_content[content]
    wrong = known.allows(found)
    assert not wrong, f"{where}: {wrong}"
    resolve(journal, found)
    return known.acknowledged_since


def check_store(server: str, writers: tuple[str, ...], where: str) -> None:
    """Check that only the writers' names are there, and that nothing is damaged."""
    with connect(server) as client:
        listed = {f"crash/{entry.key}" for entry in client.ls("crash/")} if client.exists("crash/") else set()
        assert listed <= {name for writer in writers for name in names_of(writer)}, where
        report = client.fsck()
    assert report["damage"] == 0, f"{where}: {report['findings']}"
