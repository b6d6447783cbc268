"""Work of several processes at once in one folder, each through a mount of its own; and what must hold after it.

Each function is called in every worker with its rank and the folder as each of them sees it.  It returns what went
wrong, in words; empty when nothing did.  All of it holds on a local folder, too.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.mount.place import pattern

ENDED: Final = "ended"
"""A name that is made when the work of others is over."""
SAVED_BYTES: Final = 20_000
_BESIDE_REMOVALS: Final = {errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
"""Errors that a program meets on any file system while another removes what it works in."""


def make_folders(rank: int, folders: Sequence[str], count: int) -> list[str]:
    """mkdir -p of the same folders."""
    wrong: list[str] = []
    for number in range(count):
        try:
            os.makedirs(f"{folders[rank]}/{number}/deep/er", exist_ok=True)
        except OSError as error:
            wrong.append(f"round {number}: {error!r}")
    return wrong


def make_new(rank: int, folders: Sequence[str], count: int) -> list[int]:
    """Make files that must not exist; return the numbers of those that this rank has made."""
    won: list[int] = []
    for number in range(count):
        try:
            os.close(os.open(f"{folders[rank]}/new {number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            won.append(number)
        except FileExistsError:
            continue
    return won


def append_lines(rank: int, folders: Sequence[str], name: str, count: int) -> list[str]:
    """Append lines, each with an open and a close of its own."""
    wrong: list[str] = []
    for number in range(count):
        try:
            with open(f"{folders[rank]}/{name}", "ab", buffering=0) as file:
                file.write(line(rank, number))
        except OSError as error:
            wrong.append(f"line {number}: {error!r}")
    return wrong


def append_by_one_handle(rank: int, folders: Sequence[str], name: str, count: int) -> list[str]:
    """Append lines by one handle, with an fsync behind some of them."""
    descriptor = os.open(f"{folders[rank]}/{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for number in range(count):
        os.write(descriptor, line(rank, number))
        if number % 7 == rank:
            os.fsync(descriptor)
    os.close(descriptor)
    return []


def line(rank: int, number: int) -> bytes:
    """Return a line that no other append writes."""
    return b"%d %d %s\n" % (rank, number, b"x" * (number % 50))


def lines_wrong(content: bytes, ranks: int, count: int) -> str:
    """Return how a file differs from one with each rank's lines once, and in their order."""
    found = Counter(content.splitlines(keepends=True))
    expected = Counter(line(rank, number) for rank in range(ranks) for number in range(count))
    lost, more = expected - found, found - expected
    if lost or more:
        return f"{sum(lost.values())} lines lost, {sum(more.values())} twice or torn: {[*lost, *more][:3]}"
    for rank in range(ranks):
        own = [text for text in content.splitlines(keepends=True) if text.startswith(b"%d " % rank)]
        if own != [line(rank, number) for number in range(count)]:
            return f"the lines of rank {rank} are in another order"
    return ""


def overwrite(rank: int, folders: Sequence[str], way: str, count: int) -> list[str]:
    """Give a file new contents again and again; every one is the pattern of a number, and of one length."""
    folder = folders[rank]
    for number in range(1, count + 1):
        content = pattern(number % 50 + 1, SAVED_BYTES)
        if way == "overwrite":
            Path(folder, "file").write_bytes(content)
        elif way == "edit":
            with open(f"{folder}/file", "r+b", buffering=0) as file:
                file.write(content)
        else:
            Path(folder, "file~").write_bytes(content)
            with suppress(FileNotFoundError):  # an engine that was killed has lost what it had for less than a second
                os.rename(f"{folder}/file~", f"{folder}/file")
        time.sleep(0.005)  # a reader that never finds it at rest would show nothing
    return []


def read_beside(rank: int, folders: Sequence[str], stop: str) -> tuple[int, list[str]]:
    """Open and read a file that always exists until `stop` exists; return how often, and what went wrong.

    Four threads do so at once.  The last handles of some of them stay open: a name that is open already is compared,
    not opened anew.
    """
    with ThreadPoolExecutor(4) as pool:
        reading = [pool.submit(_read_until, f"{folders[rank]}/file", stop, kept) for kept in (0, 0, 1, 3)]
        results = [thread.result() for thread in reading]
    return sum(opened for opened, _ in results), [text for _, wrong in results for text in wrong]


def _read_until(path: str, stop: str, kept: int) -> tuple[int, list[str]]:
    wrong: list[str] = []
    allowed = {pattern(number, SAVED_BYTES) for number in range(1, 51)}
    opened = 0
    handles: deque[int] = deque()
    while not (opened % 20 == 0 and os.path.lexists(stop)):
        opened += 1
        try:
            handles.append(os.open(path, os.O_RDONLY))
        except OSError as error:
            wrong.append(f"open {opened}: {error!r}")
            continue
        content = os.pread(handles[-1], 2 * SAVED_BYTES, 0)
        if content not in allowed:
            wrong.append(f"open {opened}: {len(content)} bytes that are no version of it")
        while len(handles) > kept:
            os.close(handles.popleft())
    for descriptor in handles:
        os.close(descriptor)
    return opened, wrong


def make_beside_removals(rank: int, folders: Sequence[str], stop: str) -> list[str]:
    """Make folders, files and links in a folder that another rank removes all the time."""
    wrong: list[str] = []
    generator = random.Random(rank)
    number = 0
    while not os.path.lexists(stop):
        number += 1
        tree = f"{folders[rank]}/tree"
        place = f"{tree}/{generator.randrange(3)}"
        makes: list[Callable[[], object]] = [
            lambda place=place: os.makedirs(place, exist_ok=True),  # type: ignore[misc]
            lambda place=place, number=number: Path(place, f"file {number % 5}").write_bytes(b"x"),  # type: ignore[misc]
            lambda place=place: os.symlink("nowhere", f"{place}/link"),  # type: ignore[misc]
            lambda place=place, tree=tree, number=number: os.rename(place, f"{tree}/moved {number % 3}"),  # type: ignore[misc]
        ]
        for make in makes:
            try:
                make()
            except OSError as error:
                # ESTALE of a close: the file was removed between its open and its close.
                if error.errno not in _BESIDE_REMOVALS | {errno.ESTALE}:
                    wrong.append(repr(error))
    return wrong


def remove_again_and_again(rank: int, folders: Sequence[str], count: int) -> list[str]:
    """rm -r of a folder in which others make names."""
    wrong: list[str] = []
    for _ in range(count):
        try:
            shutil.rmtree(f"{folders[rank]}/tree")
        except OSError as error:
            # Without an errno: rmtree itself saw that the folder was made anew.
            if error.errno not in {*_BESIDE_REMOVALS, None}:
                wrong.append(repr(error))
        time.sleep(0.01)
    return wrong


def make_in_one_folder(rank: int, folders: Sequence[str], stop: str) -> list[str]:
    """Make names in a folder that another rank renames away and makes anew, all the time."""
    wrong: list[str] = []
    number = 0
    while not os.path.lexists(stop):
        number += 1
        path = f"{folders[rank]}/folder/name {number}"
        try:
            if number % 3 == 0:
                os.mkdir(path)
            elif number % 3 == 1:
                os.symlink("nowhere", path)
            else:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except OSError as error:
            if error.errno != errno.ENOENT:
                wrong.append(f"name {number}: {error!r}")
    return wrong


def rename_away(rank: int, folders: Sequence[str], count: int) -> list[str]:
    """Make a folder and rename it away, again and again; nobody else makes one of its name."""
    wrong: list[str] = []
    for number in range(count):
        if len(wrong) > 3:
            break
        try:
            os.mkdir(f"{folders[rank]}/folder")
            time.sleep(0.002)
            os.rename(f"{folders[rank]}/folder", f"{folders[rank]}/away {number}")
        except OSError as error:
            wrong.append(f"round {number}: {error!r}")
            shutil.rmtree(f"{folders[rank]}/folder", ignore_errors=True)
    return wrong


def mixed(rank: int, folders: Sequence[str], seed: int, count: int) -> list[str]:
    """Do a bit of everything: append to logs, make names first, move tokens, save a file; see `mixed_wrong`."""
    generator = random.Random(f"{seed} {rank}")
    folder, wrong = folders[rank], []
    for number in range(count):
        choice = generator.randrange(6)
        try:
            if choice == 0:
                with open(f"{folder}/log {generator.randrange(2)}", "ab", buffering=0) as file:
                    file.write(line(rank, number))
                _note(folder, rank, f"appended {number}")
            elif choice == 1:
                _make_first(folder, rank, generator.randrange(40))
            elif choice == 2:
                _move_token(folder, generator)
            elif choice == 3:
                os.makedirs(f"{folder}/made/{generator.randrange(20)}/deep", exist_ok=True)
            elif choice == 4:
                _save(folder, rank, generator.randrange(1, 51))
            else:
                content = Path(folder, "file").read_bytes()
                if content not in [pattern(key, SAVED_BYTES) for key in range(1, 51)]:
                    wrong.append(f"the saved file has {len(content)} bytes that nobody saved")
        except OSError as error:
            wrong.append(f"step {number}, kind {choice}: {error!r}")
    return wrong


_noted: Final[dict[tuple[str, int], list[str]]] = {}


def _note(folder: str, rank: int, what: str) -> None:
    _noted.setdefault((folder, rank), []).append(what)


def noted(rank: int, folders: Sequence[str]) -> list[str]:
    """Return what this rank has done by `mixed`, as far as it has to be found in the end."""
    return _noted.pop((folders[rank], rank), [])


def prepare_mixed(folder: Path) -> None:
    """Make what `mixed` works on."""
    for name in ("made", "tokens", "tokens/0", "tokens/1", "tokens/2"):
        (folder / name).mkdir()
    for number in range(4):
        (folder / "tokens" / "0" / f"token {number}").write_bytes(b"%d" % number)
    (folder / "file").write_bytes(pattern(1, SAVED_BYTES))


def _make_first(folder: str, rank: int, number: int) -> None:
    with suppress(FileExistsError):
        os.close(os.open(f"{folder}/new {number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        _note(folder, rank, f"made {number}")


def _move_token(folder: str, generator: random.Random) -> None:
    source, target = generator.sample(range(3), 2)
    with suppress(FileNotFoundError):
        name = f"token {generator.randrange(4)}"
        os.rename(f"{folder}/tokens/{source}/{name}", f"{folder}/tokens/{target}/{name}")


def _save(folder: str, rank: int, key: int) -> None:
    temporary = f"{folder}/file~{rank}"
    Path(temporary).write_bytes(pattern(key, SAVED_BYTES))
    os.rename(temporary, f"{folder}/file")


def mixed_wrong(folder: Path, done: Sequence[Sequence[str]]) -> list[str]:
    """Return what does not hold after `mixed`; `done` has what each rank has noted."""
    wrong: list[str] = []
    lines = Counter(text for name in ("log 0", "log 1") if (folder / name).exists() for text in _lines(folder / name))
    for rank, notes in enumerate(done):
        numbers = [int(note.split()[1]) for note in notes if note.startswith("appended")]
        wrong += [
            f"the line {rank} {number} was written once and is there {lines[line(rank, number)]} times"
            for number in numbers
            if lines.pop(line(rank, number), 0) != 1
        ]
    wrong += [f"a line that nobody wrote: {text!r}" for text in lines]
    made = Counter(note for notes in done for note in notes if note.startswith("made"))
    wrong += [f"{count} ranks were the first: {note}" for note, count in made.items() if count != 1]
    wrong += [f"not there: {note}" for note in made if not (folder / f"new {note.split()[1]}").exists()]
    tokens = Counter(path.name for path in folder.glob("tokens/*/*"))
    if tokens != Counter(f"token {number}" for number in range(4)):
        wrong.append(f"tokens that were moved: {dict(tokens)}")
    return wrong


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)
