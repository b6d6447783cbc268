"""Random operations on a bucket and on a local folder, through fsspec: the same names, bytes, answers and errors."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hypothesis import Phase, given, settings, strategies as st
from hypothesis.strategies import DrawFn, composite

from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.e2e.served import Served
from tests.plugins.fsspec.local_model import LocalModel, Side, kind_of

EXAMPLES: Final = int(os.environ.get("LOCAL_EXAMPLES", "8"))
"""With LOCAL_EXAMPLES so many, other ones in each run; else always the same few."""
SEGMENTS: Final = ("a", "b", "a b", "%41", "#x", "ä", "日本", "a.b", ".hid", "+&=", "'\"", "\\", "~", "{b}", "\n", "é")
FILLED: Final = ("a/a", "a/b/a", "a/b/%41", "b", "a b/#x", "日本/ä/b", "a.b")
MADE: Final = ("a/empty", "+&=/b")
"""Each example begins with these objects and empty folders."""
_numbers: Final = itertools.count()


class Step:
    """A change of names or contents, done on both sides."""

    def __init__(self, text: str, run: Callable[[LocalModel, Side], None]) -> None:
        self._text = text
        self.run = run

    def __repr__(self) -> str:
        return self._text


# --- paths and contents ------------------------------------------------------------------------------


class Place:
    """A path of an example: one that exists by then, or the one that was drawn; with a pattern in one of its parts."""

    def __init__(self, path: str, number: int | None = None, wild: str = "", end: str = "") -> None:
        self._path = path
        self._number = number
        self._wild = wild
        self._end = end

    def __repr__(self) -> str:
        return f"{self._path!r} {self._number} {self._wild}{self._end}"

    def of(self, model: LocalModel) -> str:
        """Return the path."""
        names = model.names() if self._number is not None else []
        path = names[(self._number or 0) % len(names)] if names else self._path
        if not self._wild:
            return path
        parts = path.split("/")
        parts[len(self._path) % len(parts)] = self._wild
        return "/".join(parts) + self._end


_segments = st.sampled_from(("a", "b")) | st.sampled_from(SEGMENTS)
_paths = st.lists(_segments, min_size=1, max_size=3).map("/".join)
_exists = st.none() | st.integers(0, 9)
news = st.builds(Place, _paths)
places = st.builds(Place, _paths, _exists | st.integers(0, 9))
_wild = st.sampled_from(("*", "**", "?", "?*", "[ab]", "[!a]", "*b*"))
patterns = st.builds(Place, _paths, _exists, _wild, st.sampled_from(("", "", "/")))
contents = st.binary(max_size=40) | st.binary(max_size=3) | st.just(b"x" * 70_000)


# --- operations that change names ----------------------------------------------------------------------


def both(model: LocalModel, lake: Side, operation: Callable[[Side], Any]) -> bool:
    """Do an operation on both sides; return True if it succeeded on both, after comparing what they said."""
    said = [side.ask(lambda one: (operation(one), True)[1]) for side in (model, lake)]
    assert said[0] == said[1], said
    return said[0] is True


@composite
def writes(draw: DrawFn) -> Step:
    place, content, mode = (
        draw(news | places),
        draw(contents),
        draw(st.sampled_from(["pipe", "wb", "xb", "ab", "w", "a"])),
    )
    pieces = draw(st.integers(1, 3))

    def write(side: Side, path: str) -> None:
        if mode == "pipe":
            side.fs.pipe(side.at(path), content)
            return
        size = len(content) // pieces + 1
        text = {} if "b" in mode else {"encoding": "latin-1", "newline": ""}
        with side.fs.open(side.at(path), mode, **text) as file:
            for at in range(0, len(content), size):
                piece = content[at : at + size]
                file.write(piece if "b" in mode else piece.decode("latin-1"))

    def step(model: LocalModel, lake: Side) -> None:
        path = place.of(model)
        if model.is_free(path):
            both(model, lake, lambda side: write(side, path))

    return Step(f"write {place} {len(content)} {mode} {pieces}", step)


@composite
def touches(draw: DrawFn) -> Step:
    place, truncate = draw(places), draw(st.booleans())

    def step(model: LocalModel, lake: Side) -> None:
        path = place.of(model)
        if model.is_free(path):
            both(model, lake, lambda side: side.fs.touch(side.at(path), truncate=truncate))

    return Step(f"touch {place} {truncate}", step)


@composite
def makes(draw: DrawFn) -> Step:
    place, flag, how = draw(news | places), draw(st.booleans()), draw(st.sampled_from(["mkdir", "makedirs"]))

    def make(side: Side, path: str) -> None:
        if how == "mkdir":
            side.fs.mkdir(side.at(path), create_parents=flag)
        else:
            side.fs.makedirs(side.at(path), exist_ok=flag)

    def step(model: LocalModel, lake: Side) -> None:
        path = place.of(model)
        existed = model.fs.exists(model.at(path))
        if (existed or model.is_free(path, for_folder=True)) and both(model, lake, lambda side: make(side, path)):
            model.made.add(path)

    return Step(f"{how} {place} {flag}", step)


@composite
def removes(draw: DrawFn) -> Step:
    place, how = draw(places), draw(st.sampled_from(["rmdir", "rm_file", "rm", "rm -r", "rm many"]))
    others = draw(st.lists(places, max_size=3))

    def remove(side: Side, path: str, more: list[str]) -> None:
        if how in ("rmdir", "rm_file"):
            getattr(side.fs, how)(side.at(path))
        elif how == "rm many":
            side.fs.rm(side.all_at([path, *more]))
        else:
            side.fs.rm(side.at(path), recursive=how == "rm -r")

    def step(model: LocalModel, lake: Side) -> None:
        path, more = place.of(model), [other.of(model) for other in others]
        many = [path, *more]
        is_mixed = how == "rm many" and (
            len(set(many)) < len(many) or not all(map(model.fs.isfile, model.all_at(many)))
        )
        if is_mixed:  # what is removed before the error differs
            return
        both(model, lake, lambda side: remove(side, path, more))

    return Step(f"{how} {[place, *others]}", step)


@composite
def moves(draw: DrawFn) -> Step:
    source_place, target_place = draw(places), draw(news | places)

    def step(model: LocalModel, lake: Side) -> None:
        source, target = source_place.of(model), target_place.of(model)
        into = model.fs.isdir(model.at(target))
        end = f"{target}/{source.rpartition('/')[2]}" if into else target
        is_folder = model.fs.isdir(model.at(source))
        if (
            into
            and source != target
            and (model.fs.exists(model.at(end)) or not model.is_free(end, for_folder=is_folder))
        ):
            return  # the lake replaces objects
        is_onto_object = is_folder and model.fs.isfile(model.at(target))
        if is_onto_object and target.startswith(f"{source}/"):
            return  # refused for either reason
        if not is_onto_object and not model.is_free(end, for_folder=is_folder):
            return
        if f"{target}/".startswith(f"{source}/") and not model.fs.exists(model.at(source)):
            return  # the local one makes the folders of the target first
        if both(model, lake, lambda side: side.fs.mv(side.at(source), side.at(target))) and source != target:
            model.moved(source, end)

    return Step(f"mv {source_place} {target_place}", step)


@composite
def copies(draw: DrawFn) -> Step:
    source_place, target_place, recursive = draw(places | patterns), draw(news | places), draw(st.booleans())
    depth = draw(st.none() | st.integers(1, 2)) if recursive else None

    def step(model: LocalModel, lake: Side) -> None:
        source, target = source_place.of(model), target_place.of(model)
        ends = _ends(model, source, target, recursive, depth)
        if ends is None:
            return
        options = {"recursive": recursive, "maxdepth": depth}
        if both(model, lake, lambda side: side.fs.cp(side.at(source), side.at(target), **options)):
            model.made |= {end for end, is_folder in ends if is_folder}

    return Step(f"cp {source_place} {target_place} {recursive} {depth}", step)


def _ends(
    model: LocalModel, source: str, target: str, recursive: bool, depth: int | None
) -> list[tuple[str, bool]] | None:
    """Return the paths that a copy would make, and which are folders; None if it is not free, or is into itself."""
    noted: list[tuple[str, str]] = []

    class Noting(type(model.fs)):  # type: ignore[misc]
        def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
            noted.append((path1, path2))

    with suppress(OSError):
        Noting(auto_mkdir=True, skip_instance_cache=True).cp(
            model.at(source), model.at(target), recursive=recursive, maxdepth=depth
        )
    ends = [(str(model.bare(end)), model.fs.isdir(begin)) for begin, end in noted]
    begins = {str(model.bare(begin)) for begin, _ in noted}
    all_ends = {end for end, _ in ends}
    if begins & all_ends or any(not model.is_free(end, for_folder=is_folder) for end, is_folder in ends):
        return None
    files = {end for end, is_folder in ends if not is_folder}
    if len(all_ends) < len(ends) or any(one.startswith(f"{file}/") for file in files for one in all_ends):
        return None
    if any(end.startswith(f"{begin}/") for begin in begins for end in all_ends):
        return None
    return ends


changes = st.one_of(writes(), writes(), touches(), makes(), removes(), moves(), copies())


# --- questions -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """What a question asks with."""

    start: int | None
    end: int | None
    depth: int | None
    withdirs: bool
    recursive: bool
    moves: list[tuple[str, int]]


_moves = st.tuples(st.sampled_from(["read", "seek", "end", "line", "into"]), st.integers(0, 99))
_options = st.builds(
    Options,
    start=st.none() | st.integers(-50, 80_000),
    end=st.none() | st.integers(0, 90_000),
    depth=st.none() | st.integers(1, 3),
    withdirs=st.booleans(),
    recursive=st.booleans(),
    moves=st.lists(_moves, max_size=5),
)


@dataclass(frozen=True)
class Question:
    """A question about names or bytes whose answer is the same on both sides."""

    number: int
    path: Place
    pattern: Place
    options: Options

    def of(self, model: LocalModel) -> Callable[[Side], Any]:
        """Return what asks a side."""
        asked = _asked(self.path.of(model), self.pattern.of(model), self.options)
        return asked[self.number % len(asked)]


questions = st.builds(Question, st.integers(0, 99), st.just(Place("")) | places | places, patterns, _options)


def _asked(path: str, pattern: str, options: Options) -> list[Callable[[Side], Any]]:
    depth, withdirs, recursive = options.depth, options.withdirs, options.recursive
    return [
        lambda side: sorted(side.fs.ls(side.at(path), detail=False)),
        lambda side: [
            (entry["name"], entry["type"]) for entry in sorted(side.fs.ls(side.at(path), detail=True), key=str)
        ],
        lambda side: _kind_and_size(side.fs.info(side.at(path))),
        lambda side: [ask(side.at(path)) for ask in (side.fs.exists, side.fs.isdir, side.fs.isfile, side.fs.lexists)],
        lambda side: side.fs.find(side.at(path), maxdepth=depth, withdirs=withdirs),
        lambda side: side.fs.glob(side.at(pattern), maxdepth=depth),
        lambda side: sorted(side.fs.glob(side.at(pattern), detail=True)),
        lambda side: side.fs.du(side.at(path), total=recursive, maxdepth=depth),
        lambda side: sorted((top, sorted(d), sorted(f)) for top, d, f in side.fs.walk(side.at(path), maxdepth=depth)),
        lambda side: side.fs.expand_path(side.at(pattern), recursive=recursive, maxdepth=depth),
        lambda side: side.fs.expand_path(side.all_at([path, pattern]), recursive=recursive),
        lambda side: side.fs.cat_file(side.at(path), options.start, _end(options.start, options.end)),
        lambda side: _answers(side.fs.cat_ranges(side.all_at([path, "a", path]), [0, 1, 2], [5, 9, 2])),
        lambda side: _answers(side.fs.cat(side.at(pattern), recursive=recursive, on_error="omit")),
        lambda side: [
            side.fs.head(side.at(path), 7),
            side.fs.tail(side.at(path), 7),
            side.fs.read_block(side.at(path), 3, 9, b"x"),
        ],
        lambda side: _read(side, path, options.moves),
        lambda side: side.fs.read_text(side.at(path), encoding="latin-1", newline=""),
        lambda side: side.fs.sizes(side.all_at([path])) if side.fs.isfile(side.at(path)) else None,
    ]


def _end(start: int | None, end: int | None) -> int | None:
    """Return an end that is not before its start: fsspec's own file system reads all then."""
    return None if end is None or (start or 0) < 0 else max(end, start or 0)


def _kind_and_size(entry: dict[str, Any]) -> tuple[str, str, int]:
    return entry["name"], entry["type"], entry["size"] if entry["type"] == "file" else 0


def _answers(found: Any) -> Any:
    if isinstance(found, dict):
        return {path: _answers([one])[0] for path, one in found.items()}
    return [kind_of(one) if isinstance(one, Exception) else one for one in found]


def _read(side: Side, path: str, moves: list[tuple[str, int]]) -> list[Any]:
    said: list[Any] = []
    with side.fs.open(side.at(path), "rb") as file:
        for what, count in moves:
            if what == "read":
                said.append(file.read(count))
            elif what == "seek":
                said.append(file.seek(count))
            elif what == "end":
                size = file.seek(0, io.SEEK_END)
                said.append(file.seek(max(0, size - count)))
            elif what == "line":
                said.append(file.readline())
            else:
                buffer = bytearray(count)
                said.append((file.readinto(buffer), bytes(buffer)))
            said.append(file.tell())
        said.append(file.read())
    return said


# --- the tests -------------------------------------------------------------------------------------------


@settings(
    max_examples=EXAMPLES,
    derandomize="LOCAL_EXAMPLES" not in os.environ,
    report_multiple_bugs=False,
    phases=set(Phase) - {Phase.explain},
)
@given(steps=st.lists(st.tuples(changes, questions), min_size=10, max_size=30))
def test_a_bucket_answers_as_a_local_folder_does(served: Served, steps: list[tuple[Step, Question]]) -> None:
    fs = LakeFileSystem(server=served.server)
    bucket = f"example-{next(_numbers)}"
    fs.mkdir(bucket)
    lake = Side(fs, bucket)
    with TemporaryDirectory(prefix="lake-") as folder:
        model = LocalModel(Path(folder) / bucket)
        for side in (model, lake):
            side.fs.pipe({side.at(path): path.encode() for path in FILLED})
            for path in MADE:
                side.fs.makedirs(side.at(path))
        model.made |= set(MADE)
        assert lake.state() == model.state()
        for change, question in steps:
            change.run(model, lake)
            model.settle()
            assert lake.state() == model.state()
            assert lake.ask(question.of(model)) == model.ask(question.of(model))
    fs.rm(bucket, recursive=True)
