"""`lake` of a neighbouring release: one that lacks the newest optional parts, or has some that this one does not know.

    python -m tests.neighbour FILE serve ...

FILE has the release, one of RELEASES, and is read by each process when it starts.  Members and heads that `lake serve`
starts read it too, so a test that writes it and ends a process upgrades that one alone.

- `previous`: newest fields of requests are not understood and those of answers not sent; OpenKeyHomes is unknown, and
  so not offered; records lack their newest fields.
- `next`: every message and record ends with a field that nobody knows, and Hello has a feature bit that may be ignored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.planting import plant

UNKNOWN_FEATURE: Final = 1 << 31
UNKNOWN_FIELD: Final = "of a later release"


def be_today() -> None:
    """Change nothing."""


def be_previous() -> None:
    """Lack what was added last."""
    from engine.coordinator.records import DirtyRecord
    from engine.head import head
    from lakefs.wire import connection, messages as m

    lacks: dict[type, int] = {m.EpochKnown: 4, m.ShardsListed: 2, DirtyRecord: 1}
    newer = (m.KeyedPut, m.KeyedCommit, m.KeyedRemove, m.ListShards, m.DropShards)
    for request, count in (*((request, 1) for request in newer), (m.ReadChunks, 2)):
        known = len(request.__struct_fields__) - count
        decode = connection._decode_request[request.OP]
        connection._decode_request[request.OP] = partial(_decode_without, decode, known)
    del connection._decode_request[m.OpenKeyHomes.OP]
    plant(head, "_OFFERED", head._OFFERED & ~m.FEATURE_KEY_HOMES)
    _encode_as(lambda value, fields: fields[: len(fields) - lacks.get(type(value), 0)])


def be_next() -> None:
    """Have more than anybody knows."""
    from lakefs.wire import messages as m

    def more(value: object, fields: list[Any]) -> list[Any]:
        if isinstance(value, (m.Hello, m.HelloReply)):
            at = type(value).__struct_fields__.index("features")
            fields[at] |= UNKNOWN_FEATURE
        return [*fields, UNKNOWN_FIELD]

    _encode_as(more)


RELEASES: Final[dict[str, Callable[[], None]]] = {"today": be_today, "previous": be_previous, "next": be_next}


def _decode_without(decode: Callable[[bytes], Any], known: int, message: bytes) -> Any:
    """Decode a request without the fields behind those that are known."""
    return decode(msgspec.msgpack.encode(msgspec.msgpack.decode(message)[:known]))


def _encode_as(change: Callable[[object, list[Any]], list[Any]]) -> None:
    """Let the fields of messages and records be others when they are sent, or stored."""
    from engine.coordinator import records
    from lakefs.wire import frames
    from lakefs.wire.base import Message

    def encode_message(value: object) -> bytes:
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        return msgspec.msgpack.encode(change(value, fields) if isinstance(value, Message) else fields)

    class RecordEncoder:
        def encode(self, stored: tuple[int, object]) -> bytes:
            version, fields = msgspec.msgpack.decode(msgspec.msgpack.encode(stored))
            return msgspec.msgpack.encode((version, change(stored[1], fields)))

    plant(frames, "_encode", encode_message)
    plant(records, "_encoder", RecordEncoder())


def _as_neighbour(file: str, command: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """Return the command of a child that reads the file when it starts."""
    words: Sequence[str] = command(*arguments)
    at = words.index("cli.main")
    return [*words[:at], "tests.neighbour", file, *words[at + 1 :]]


def main() -> None:
    """Be `lake`, of the release that the file names."""
    from cli.main import main as lake
    from cli.serve import serve

    file = sys.argv.pop(1)
    RELEASES[Path(file).read_text().strip()]()
    for name in ("member_command", "head_command"):
        plant(serve, name, partial(_as_neighbour, file, getattr(serve, name)))
    lake()


if __name__ == "__main__":
    main()
