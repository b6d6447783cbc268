"""Everything that a store answers: asked of a whole one, and again of one with a flipped bit.

An answer is a run of texts.  `problem_of` says what is wrong with one, by the rules of `docs/durability.md`: an error
is not a wrong answer; "not found" for something that exists is one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import cast

from engine.process.embedded import EmbeddedEngine
from lakefs.client.trio.lake import TrioLake
from lakefs.errors import LakeError, UserError
from lakefs.lake.multipart import UploadName
from lakefs.wire import messages as m
from lakefs.wire.media import MEDIUM_INLINE
from tests.flips.samples import BUCKETS, KEPT

_FOLDER = 1
_LARGE = ("plain/sizes/", "plain/large", "plain/copy")
_ALSO_ASKED = ("plain/empty folder/", "plain/nothing", "plain/many/nothing", "kept/again and again!", "absent/x")
WRITTEN = "written before the walk"
NEW = "new"
"""Folder in `plain`, for names that make the index take free pages."""
_TIMES = re.compile(r"[mc]time_ns=\d+, ")
Lines = tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """An answer: its lines, or the error's class.  `missing`: that error says that there is nothing."""

    lines: Lines = ()
    error: str = ""
    missing: bool = False


Answers = dict[str, Answer]


async def ask_everything(engine: EmbeddedEngine, lake: TrioLake, names: list[str]) -> Answers:
    """Ask for all lists, all stats, all contents; `names` are the objects that exist."""
    answers: Answers = {}

    async def ask(question: str, asked: Callable[[], Awaitable[Lines]]) -> None:
        try:
            answers[question] = Answer(await asked())
        except LakeError as error:
            answers[question] = _failed(error)

    await ask("buckets", lambda: _buckets(lake))
    await ask("keys", lambda: _keys(lake))
    for bucket in BUCKETS:
        for prefix in ("", "many/", "sizes/", "later/"):
            await ask(f"ls {bucket}/{prefix}", lambda b=bucket, p=prefix: _listed(lake, b, p))  # type: ignore[misc]
    await ask("versions", lambda: _versions(engine))
    await ask("uploads", lambda: _uploads(lake))
    await ask("parts", lambda: _parts_of(engine, lake))
    await _ask_names(engine, [*names, *_ALSO_ASKED], answers)
    for name in names:
        if name.startswith(_LARGE):
            await ask(f"get {name}", lambda n=name: _content(lake, n))  # type: ignore[misc]
    return answers


async def _ask_names(engine: EmbeddedEngine, names: list[str], answers: Answers) -> None:
    """Ask for every name's stat, and for the content of small ones, many in a request."""
    split = [(bucket, key) for bucket, _, key in (name.partition("/") for name in names)]
    for what, request in (
        ("stat", m.StatNames(split)),
        ("open", m.OpenObjects(split, inline_bytes=1 << 20, lease=False)),
    ):
        try:
            reply = await engine.call(request)
        except LakeError as error:
            answers |= {f"{what} {name}": _failed(error) for name in names}
            continue
        body = reply.body.joined()
        reply.body.release()
        assert isinstance(reply.message, m.NameResults | m.OpenResults)
        results = cast(list[m.NameResult | m.OpenResult], reply.message.results)
        for name, result in zip(names, results, strict=True):
            failed = result.failure and _failed(result.failure.as_error())
            answers[f"{what} {name}"] = failed or Answer(_told(result, body))


def _told(result: m.NameResult | m.OpenResult, body: bytes) -> Lines:
    """Return a stat as lines, with the bytes of a small object."""
    if isinstance(result, m.NameResult):
        return (repr(result.stat),)
    assert result.opened is not None
    inline = [
        body[grant.offset : grant.offset + grant.stored_bytes]
        for grant in result.opened.grants
        if grant.medium == MEDIUM_INLINE
    ]
    return (repr(result.opened.stat), *(hashlib.sha256(payload).hexdigest() for payload in inline))


def _failed(error: LakeError) -> Answer:
    return Answer((), f"{type(error).__name__}: {error}", isinstance(error, UserError))


async def names_of(lake: TrioLake) -> list[str]:
    """Return all objects and symlinks that exist."""
    return [f"{b}/{entry.key}" for b in BUCKETS async for entry in lake.ls(f"{b}/") if entry.kind != _FOLDER]


def but_for_writing(answer: Answer) -> Answer:
    """Leave out what writing and removing names may change, or may leave behind when an error interrupted it."""
    lines = [
        _TIMES.sub("", line) if f"kind={_FOLDER}," in line else line
        for line in answer.lines
        if f"/{WRITTEN}'" not in line and f"key='{NEW}/" not in line
    ]
    return replace(answer, lines=tuple(lines))


def problem_of(expected: Answer, answer: Answer, *, mended: bool = False) -> str:
    """Say what is wrong with an answer; empty when nothing is.  `mended`: an error is wrong, too."""
    if answer == expected:
        return ""
    if mended and answer.error:
        return f"not made whole: {answer.error}"
    if answer.error:
        return f"a false answer: {answer.error}" if answer.missing else ""
    foreign = set(answer.lines) - set(expected.lines)
    if foreign:
        return f"wrong: {sorted(foreign)[:2]}"[:600]
    return "incomplete"


async def _buckets(lake: TrioLake) -> Lines:
    return tuple(map(repr, await lake.buckets()))


async def _keys(lake: TrioLake) -> Lines:
    return tuple(map(repr, await lake.access_keys()))


async def _listed(lake: TrioLake, bucket: str, prefix: str) -> Lines:
    return tuple([repr(entry) async for entry in lake.ls(f"{bucket}/{prefix}", folders=True)])


async def _versions(engine: EmbeddedEngine) -> Lines:
    """Return all versions; for the bucket that keeps them also their contents, which are small."""
    lines: list[str] = []
    for bucket in BUCKETS:
        reply = await engine.call(m.ListVersions(bucket))
        assert isinstance(reply.message, m.ListedVersions)
        entries = reply.message.entries
        lines += map(repr, entries)
        if bucket == KEPT:
            names = [(bucket, entry.key) for entry in entries]
            opened = await engine.call(m.OpenObjects(names, lease=False, versions=[e.version for e in entries]))
            assert isinstance(opened.message, m.OpenResults)
            body = opened.body.joined()
            opened.body.release()
            for result in opened.message.results:
                if result.failure:
                    raise result.failure.as_error()
                lines += _told(result, body)
    return tuple(lines)


async def _uploads(lake: TrioLake) -> Lines:
    """Return the uploads under way, and the parts stored for them."""
    lines: list[str] = []
    for bucket in BUCKETS:
        async for entry in lake.uploads(f"{bucket}/"):
            name = UploadName(bucket, entry.key, entry.upload)
            lines += [repr(entry), *[repr(part) async for part in lake.parts(name)]]
    return tuple(lines)


async def _parts_of(engine: EmbeddedEngine, lake: TrioLake) -> Lines:
    """Return where the parts begin of an object that was uploaded in parts."""
    stat = await lake.stat("plain/large")
    reply = await engine.call(m.UploadedParts(stat.upload))
    assert isinstance(reply.message, m.ObjectParts)
    return tuple(map(repr, reply.message.parts))


async def _content(lake: TrioLake, name: str) -> Lines:
    async with await lake.open(name) as opened:
        whole = await opened.read()
        part = await opened.read(len(whole) // 3, len(whole) // 5) if len(whole) > 10 else b""
    return (hashlib.sha256(whole).hexdigest(), hashlib.sha256(part).hexdigest())
