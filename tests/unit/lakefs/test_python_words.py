"""Errors as programmers read them: calls in the place of commands and options, in each message that a client gets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

import pytest

from lakefs import errors
from lakefs.errors import BucketNotFound, KeyNotFound
from lakefs.python_words import WORDS, in_python
from tests.e2e.served import ROOT

ERRORS: Final = {row.error.__name__ for row in errors.ERROR_TABLE}
COMMANDS: Final = (
    "bucket|cat|cluster|config|cp|doctor|du|fsck|gateway|gc|get|key|kv|ls|mount|mv|put|rm|scrub|serve|stat(us)?"
)
COMMAND: Final = re.compile(rf"\blake ({COMMANDS})\b|(?<= )--[a-z-]+|(?<= )-r\b")
IN_A_SHELL: Final = re.compile(
    r"lake serve|lake cluster \w+|lake fsck --data( DIR)?( --\w+)*( --accept-loss)?|spaces of keyed blobs \(lake kv\)"
)
"""Commands for what no client does: an engine that is not running, a lake's machines; and a feature's name."""
OF_THE_STORE: Final = (
    *("engine/process", "engine/lake/", "engine/mirror", "engine/etcd", "engine/superblock", "engine/fsck"),
    *("engine/walker", "engine/coordinator", "engine/head/start"),
)
"""Parts whose messages are those of a start, or of an operator's command."""


def messages() -> Iterator[tuple[str, str]]:
    """Yield place and text of each message of an error, with X for what is filled in."""
    for package in ("lakefs", "engine"):
        for path in sorted((ROOT / package).rglob("*.py")):
            place = str(path.relative_to(ROOT))
            if place.startswith((*OF_THE_STORE, "lakefs/plugins", "lakefs/config", "lakefs/python_words")):
                continue
            nodes = list(ast.walk(ast.parse(path.read_text())))
            pieces = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in nodes:
                if isinstance(node, (ast.JoinedStr, ast.Constant)) and id(node) not in pieces:
                    text = _text(node)
                    if text and COMMAND.search(text) and not _is_docstring(text):
                        yield f"{place}:{node.lineno}", text


def _text(node: ast.JoinedStr | ast.Constant) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(
        part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "X" for part in parts
    )


def _is_docstring(text: str) -> bool:
    return text.endswith((".", ".\n")) or "\n" in text


def test_no_message_of_a_client_names_a_command_that_a_call_does() -> None:
    found = dict(messages())
    assert len(found) > 10
    left = {place: text for place, text in found.items() if COMMAND.search(IN_A_SHELL.sub("", in_python(text)))}
    assert not left, "\n".join(f"{place}: {text}" for place, text in left.items())


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("see what does with: lake ls models/", 'see what does with: lake.ls("models/")'),
        ("create it with: lake bucket create a-b", 'create it with: lake.create_bucket("a-b"), or the argument '),
        ("first: lake rm -r models/", 'first: lake.remove_tree("models")'),
        ("put it again with: lake put FILE a/b; see", 'lake.put("a/b", pathlib.Path(FILE)); see'),
        ("damaged with: lake fsck --full", "damaged with: lake.fsck(full=True)"),
        ("damaged; see: lake fsck", "damaged; see: lake.fsck()"),
        ("stop it; run: lake fsck --data DIR --repair", "run: lake fsck --data DIR --repair"),
        ("remove objects, then run: lake gc", "then run: lake.gc()"),
        ("start one with: lake serve, or name one with --server or LAKE_SERVER", "lakefs.connect(ADDRESS) or LAKE_"),
        ("x: is a folder; use -r", "use lake.put_tree"),
        ("a lake of two members", "a lake of two members"),
    ],
)
def test_commands_are_said_as_calls(message: str, said: str) -> None:
    assert said in in_python(message)


def test_an_error_says_calls_to_programmers_and_commands_to_all_faces() -> None:
    error = KeyNotFound("'m/x' does not exist; see what does with: lake ls m/", subject="m/x")
    assert str(error) == error.strerror == "'m/x' does not exist; see what does with: lake.ls(\"m/\")"
    assert error.message.endswith("lake ls m/")
    assert f"{BucketNotFound('make it: lake bucket create m')}".startswith('make it: lake.create_bucket("m")')


def test_every_pattern_is_used() -> None:
    texts = [text for _, text in messages()]
    unused = [pattern for pattern, _ in WORDS if not any(re.search(pattern, text) for text in texts)]
    assert not unused
