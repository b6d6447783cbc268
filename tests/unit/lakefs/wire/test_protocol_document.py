"""`docs/protocol.md` has the fields of every message, the errors, and what may be repeated, as the code has them."""

from __future__ import annotations

import re
import types
import typing
from typing import Final

import msgspec
import pytest

from lakefs import limits
from lakefs.errors import ERROR_TABLE
from lakefs.wire import messages
from lakefs.wire.messages import REQUESTS, Message, Request
from lakefs.wire.repeat import REPEATABLE
from tests.style.source_tree import ROOT

PAGE: Final = ROOT / "docs" / "protocol.md"
TYPE_NAMES: Final[dict[object, str]] = {int: "int", str: "str", bytes: "bin", bool: "bool"}


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table with that header row."""
    lines = PAGE.read_text().splitlines()
    begin = lines.index(header) + 2
    found: list[list[str]] = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return found


def type_text(hint: object) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        [inner] = [argument for argument in arguments if argument is not type(None)]
        return f"{type_text(inner)} or nil"
    if origin is list:
        return f"array of {type_text(arguments[0])}"
    if origin is dict:
        return f"map of {type_text(arguments[0])} to {type_text(arguments[1])}"
    if origin is tuple:
        return f"({', '.join(map(type_text, arguments))})"
    return TYPE_NAMES.get(hint) or str(getattr(hint, "__name__", hint))


def fields_text(message: type[Message]) -> str:
    hints = typing.get_type_hints(message)
    return ", ".join(
        f"`{field.name}` {type_text(hints[field.name])}{'' if field.required else '?'}"
        for field in msgspec.structs.fields(message)
    )


def answers() -> dict[str, type[Message]]:
    return {
        name: found
        for name, found in vars(messages).items()
        if isinstance(found, type) and issubclass(found, Message) and not issubclass(found, Request)
    }


def test_every_request_is_documented_with_its_fields() -> None:
    documented = {int(op): (name, fields) for op, name, fields, _ in rows("| op | name | request fields | reply |")}
    assert documented == {op: (found.__name__, fields_text(found)) for op, found in REQUESTS.items()}


def test_every_other_message_is_documented_with_its_fields() -> None:
    documented = {cells[0]: cells[1] for cells in rows("| message | fields |")}
    assert documented == {name: fields_text(found) for name, found in answers().items() if found is not Message}


def test_what_may_be_repeated_is_what_clients_repeat() -> None:
    documented = {
        name: repeat == "yes" for name, _, repeat, _ in rows("| name | durable with the reply | repeat | why |")
    }
    assert documented == {found.__name__: found in REPEATABLE for found in REQUESTS.values()}


def test_every_error_is_documented() -> None:
    documented = {int(code): (name, retryable) for code, name, retryable in rows("| code | name | retryable |")}
    assert documented == {
        row.wire_code: (row.error.__name__, "yes" if row.error.retryable else "no") for row in ERROR_TABLE
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30 s (FRAME_TIMEOUT_S)", limits.FRAME_TIMEOUT_S),
        ("5 s (HELLO_TIMEOUT_S)", limits.HELLO_TIMEOUT_S),
        ("(64, INFLIGHT_PER_CONNECTION)", limits.INFLIGHT_PER_CONNECTION),
        ("(4,096, CONNECTIONS_MAX)", limits.CONNECTIONS_MAX),
        ("64 (STRANGERS_MAX)", limits.STRANGERS_MAX),
        ("64 (SESSIONS_LINGERING_MAX)", limits.SESSIONS_LINGERING_MAX),
        ("60 s (SESSION_LINGER_S)", limits.SESSION_LINGER_S),
        ("4,096 (SESSIONS_PER_CONNECTION_MAX)", limits.SESSIONS_PER_CONNECTION_MAX),
        ("65,536 (SESSIONS_MAX)", limits.SESSIONS_MAX),
        ("4,096 (BATCH_MAX)", limits.BATCH_MAX),
        ("at most 32 (STAMPS_PER_ANSWER_MAX)", limits.STAMPS_PER_ANSWER_MAX),
        ("5 s (ENGINE_WAIT_S)", limits.ENGINE_WAIT_S),
        ("at most 64 |", limits.DESCRIPTORS_PER_FRAME_MAX),
        ("at most 16.", limits.WATCHES_PER_CONNECTION_MAX),
    ],
)
def test_the_limits_are_the_codes(text: str, value: float) -> None:
    assert text in " ".join(PAGE.read_text().split())
    numbers = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", text)]
    assert numbers == [value]
