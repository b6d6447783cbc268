"""A writer that keeps a journal of its own: what it was about to do, and what was acknowledged.

Each writer has keys of its own and does one thing at a time, so at most one change of each is in doubt when the
engine, or the writer, is killed.  Contents are made anew from their names, so the journal holds only those.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, field
from pathlib import Path

from lakefs.client.blocking import Lake
from lakefs.client.connect import connect
from lakefs.errors import EngineUnreachable, OperationalError

KEYS = 12
BATCH = 10
SIZES = (0, 100, 5_000, 30_000, 65_536, 200_000, 1_500_000, 4 << 20, 9_000_000)
SMALL, SMALL_COUNT = "small", 6
WEIGHTS = (2, 20, 20, 20, 4, 10, 4, 1, 2)
State = dict[str, str | None]
"""Name -> the name of its content; None: the name is absent."""


def content_of(label: str) -> bytes:
    """The bytes that a label stands for."""
    generator = random.Random(label)
    count = SMALL_COUNT if label.startswith(SMALL) else len(SIZES)
    (size,) = generator.choices(SIZES[:count], WEIGHTS[:count])
    return generator.randbytes(size)


@dataclass
class Change:
    """What one operation makes of some names, and how much of it may be there when it was not acknowledged.

    `together`: all of it or nothing; else each name by itself.
    """

    after: State
    together: bool = True


@dataclass
class Known:
    """What a writer's journal says: the state acknowledged, and the change in doubt."""

    state: State = field(default_factory=dict)
    doubt: Change | None = None
    acknowledged: int = 0

    def allows(self, found: State) -> list[str]:
        """Complaints about what was found for all of the writer's names."""
        doubt = self.doubt.after if self.doubt else {}
        wrong = [
            f"{name}: {found[name]} instead of {self.state.get(name)}"
            for name in found
            if name not in doubt and found[name] != self.state.get(name)
        ]
        came = {name: found[name] == label for name, label in doubt.items()}
        stayed = {name: found[name] == self.state.get(name) for name in doubt}
        wrong += [
            f"{name}: {found[name]}, neither old nor new" for name in doubt if not came[name] | stayed[name]
        ]
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
            known.acknowledged += 1
    return known


def resolve(path: Path, found: State) -> None:
    """After a check: what was in doubt is what was found; the journal goes on from there."""
    with path.open("a") as journal:
        journal.write("\n" if path.stat().st_size and not path.read_bytes().endswith(b"\n") else "")
        journal.write(
            json.dumps({"after": found, "together": True}) + "\n" + json.dumps({"done": True}) + "\n"
        )


def names_of(writer: str) -> list[str]:
    """All names that a writer ever uses."""
    return [f"crash/{writer}/{number}" for number in range(KEYS)] + [
        f"crash/{writer}/folder/{number}" for number in range(BATCH)
    ]


def write(address: str, writer: str, seed: str, journal_path: Path, told: int) -> None:
    """Change names until the engine is gone; a byte goes to the pipe `told` for each acknowledgement."""
    generator = random.Random(f"{writer} {seed}")
    state = dict(read_journal(journal_path).state) if journal_path.exists() else {}
    try:
        lake = connect(address)
    except EngineUnreachable:
        return  # the engine was killed while this writer said hello
    with journal_path.open("ab", buffering=0) as journal, lake:
        for number in range(1 << 30):
            try:
                _change(lake, generator, writer, f"{writer} {seed} {number}", state, journal.fileno())
            except OperationalError:
                return
            os.write(told, b".")


def _change(
    lake: Lake, generator: random.Random, writer: str, label: str, state: State, journal: int
) -> None:
    """One operation, between its two lines of the journal."""
    names = names_of(writer)[:KEYS]
    present = [name for name in names if state.get(name)]
    action = generator.choice(("put", "put", "put", "stream", "batch", "remove", "move", "copy"))
    source, target = generator.choice(present or names), generator.choice(names)
    if action in ("remove", "move", "copy") and (not present or source == target):
        action = "put"
    if action == "batch":
        change = Change({name: f"{SMALL} {label} {name}" for name in names_of(writer)[KEYS:]}, together=False)
    elif action == "remove":
        change = Change({source: None})
    elif action == "move":
        change = Change({source: None, target: state[source]})
    elif action == "copy":
        change = Change({target: state[source]})
    else:
        change = Change({target: label})
    os.write(journal, json.dumps({"after": change.after, "together": change.together}).encode() + b"\n")
    if action == "batch":
        lake.put_many([(name, content_of(content or "")) for name, content in change.after.items()])
    elif action == "remove":
        assert lake.remove(source)
    elif action == "move":
        lake.move(source, target)
    elif action == "copy":
        lake.copy(source, target)
    elif action == "put":
        lake.put(target, content_of(label))
    else:
        _put_file(lake, target, content_of(label))
    os.write(journal, b'{"done": true}\n')
    state.update(change.after)


def _put_file(lake: Lake, name: str, content: bytes) -> None:
    """By descriptor: the engine reads the file itself."""
    descriptor = os.memfd_create("content")
    try:
        os.write(descriptor, content)
        lake.put(name, Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)
