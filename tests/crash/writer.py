"""A writer that keeps a journal: what it was about to do, and what was acknowledged.

Each writer has keys of its own and does one thing at a time, so at most one of its changes is in doubt when the engine,
or the writer, is killed.  Contents can be made again from their names, so the journal holds only the names.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lakefs.client.blocking.lake import Lake
from lakefs.client.connect import connect
from lakefs.errors import EngineUnreachable, OperationalError

KEYS = 12
BATCH = 10
SIZES = (0, 100, 5_000, 30_000, 65_536, 200_000, 1_500_000, 4 << 20, 9_000_000)
SMALL, SMALL_COUNT = "small", 6
WEIGHTS = (2, 20, 20, 20, 4, 10, 4, 1, 2)
State = dict[str, str | None]
"""Each name with the name of its content; None: the name is absent."""


def content_of(label: str) -> bytes:
    """Return the bytes that a label stands for."""
    generator = random.Random(label)
    count = SMALL_COUNT if label.startswith(SMALL) else len(SIZES)
    (size,) = generator.choices(SIZES[:count], WEIGHTS[:count])
    return generator.randbytes(size)


def _alike(one: str | None, other: str | None) -> bool:
    """Return whether two labels stand for the same bytes: different labels can stand for no bytes."""
    return one == other or (bool(one and other) and content_of(one or "") == content_of(other or ""))


@dataclass
class Change:
    """The effect of one operation on some names, and how much of it may be there when it was not acknowledged.

    `together`: all of it or nothing; otherwise each name by itself.
    """

    after: State
    together: bool = True


@dataclass
class Known:
    """The contents of a writer's journal: the state acknowledged, and the change in doubt."""

    state: State = field(default_factory=dict)
    doubt: Change | None = None
    acknowledged_since: int = 0
    """Changes acknowledged since the last check resolved what was in doubt."""

    def allows(self, found: State) -> list[str]:
        """Return complaints about what was found for all of the writer's names."""
        doubt = self.doubt.after if self.doubt else {}
        wrong = [
            f"{name}: {found[name]} instead of {self.state.get(name)}"
            for name in found
            if name not in doubt and not _alike(found[name], self.state.get(name))
        ]
        came = {name: _alike(found[name], label) for name, label in doubt.items()}
        stayed = {name: _alike(found[name], self.state.get(name)) for name in doubt}
        wrong += [f"{name}: {found[name]}, neither old nor new" for name in doubt if not came[name] | stayed[name]]
        if self.doubt and self.doubt.together and not all(came.values()) and not all(stayed.values()):
            wrong.append(f"half of {doubt} happened: {came}")
        return wrong


def read_journal(path: Path) -> Known:
    """Replay a writer's journal; a torn last line never happened."""
    known = Known()
    for line in path.read_text().splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        entry = json.loads(line)
        if "after" in entry:
            known.doubt = Change(entry["after"], entry["together"])
        elif known.doubt is not None:
            known.state.update(known.doubt.after)
            known.doubt = None
            known.acknowledged_since = 0 if "resolved" in entry else known.acknowledged_since + 1
    return known


def resolve(path: Path, found: State) -> None:
    """Write to the journal, after a check, that what was found of a change in doubt is what happened."""
    with path.open("a") as journal:
        journal.write("\n" if path.stat().st_size and not path.read_bytes().endswith(b"\n") else "")
        journal.write(json.dumps({"after": found, "together": True}) + "\n" + json.dumps({"resolved": True}) + "\n")


def names_of(writer: str) -> list[str]:
    """Return all names that a writer ever uses."""
    return [f"crash/{writer}/{number}" for number in range(KEYS)] + [
        f"crash/{writer}/folder/{number}" for number in range(BATCH)
    ]


class Hand(Protocol):
    """A way to change names: one connection, one thing at a time.

    Raises OperationalError when it is not known whether a change happened.
    """

    @property
    def actions(self) -> tuple[str, ...]:
        """The actions that it can do; one that is listed twice is done twice as often."""
        ...

    def do(self, action: str, source: str, target: str, contents: dict[str, bytes]) -> None:
        """Do an action; `contents` are the bytes of the names that it makes."""
        ...


class NativeHand:
    """A hand on the native protocol."""

    actions = ("put", "put", "put", "swap", "stream", "batch", "remove", "move", "copy")

    def __init__(self, lake: Lake) -> None:
        self._lake = lake

    def do(self, action: str, source: str, target: str, contents: dict[str, bytes]) -> None:
        """See `Hand`."""
        if action == "batch":
            self._lake.put_many(list(contents.items()))
        elif action == "remove":
            assert self._lake.remove(source)
        elif action == "move":
            self._lake.move(source, target)
        elif action == "copy":
            self._lake.copy(source, target)
        elif action == "put":
            self._lake.put(target, contents[target])
        elif action == "swap":
            there = self._lake.exists(target)
            etag = self._lake.stat(target).etag if there else ""
            self._lake.put(target, contents[target], if_absent=not there, if_match=etag)
        else:
            _put_file(self._lake, target, contents[target])


def write(address: str, writer: str, seed: str, journal_path: Path, told: int) -> None:
    """Change names until the engine is gone; write a byte to the pipe `told` for each acknowledgement."""
    try:
        lake = connect(address)
    except EngineUnreachable:
        return  # the engine was killed while this writer connected
    with lake:
        write_with(NativeHand(lake), writer, seed, journal_path, told)


def write_with(hand: Hand, writer: str, seed: str, journal_path: Path, told: int) -> None:
    """Like `write`, with any hand."""
    generator = random.Random(f"{writer} {seed}")
    state = dict(read_journal(journal_path).state) if journal_path.exists() else {}
    with journal_path.open("ab", buffering=0) as journal:
        for number in range(1 << 30):
            try:
                _change(hand, generator, writer, f"{writer} {seed} {number}", state, journal.fileno())
            except OperationalError:
                return
            os.write(told, b".")


def _change(hand: Hand, generator: random.Random, writer: str, label: str, state: State, journal: int) -> None:
    """Do one operation, between its two lines of the journal."""
    names = names_of(writer)[:KEYS]
    present = [name for name in names if state.get(name)]
    action = generator.choice(hand.actions)
    source, target = generator.choice(present or names), generator.choice(names)
    if action in ("remove", "move", "copy") and (not present or source == target):
        action = "put"
    made: dict[str, str] = {}
    change: State = {}
    if action == "batch":
        made = {name: f"{SMALL} {label} {name}" for name in names_of(writer)[KEYS:]}
    elif action == "remove":
        change = {source: None}
    elif action == "move":
        change = {source: None, target: state[source]}
    elif action == "copy":
        change = {target: state[source]}
    else:
        made = {target: label}
    change = change or dict(made)
    contents = {name: content_of(content) for name, content in made.items()}
    os.write(journal, json.dumps({"after": change, "together": action != "batch"}).encode() + b"\n")
    hand.do(action, source, target, contents)
    os.write(journal, b'{"done": true}\n')
    state.update(change)


def _put_file(lake: Lake, name: str, content: bytes) -> None:
    """Put by descriptor: the engine reads the file itself."""
    descriptor = os.memfd_create("content")
    try:
        os.write(descriptor, content)
        lake.put(name, Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)
