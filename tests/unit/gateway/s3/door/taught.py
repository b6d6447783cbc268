"""A repeater that was taught by hand: one signer, one object, stamps and a slab in memory of the test."""

from __future__ import annotations

import hmac
import mmap
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Final

from gateway.http._door import Door
from gateway.s3.door._repeater import Put, Repeater
from lakefs.host.crc import crc32c
from lakefs.limits import GRANULE_BYTES, KIB
from lakefs.shared_index.table import SharedTable
from lakefs.shared_index.table_format import pack_place, table_bytes
from lakefs.stamps.stamps import StampMemory, memory_bytes
from lakefs.wire.media import MEDIUM_DRAM

HOST: Final = b"lake.test:9000"
TARGET: Final = b"/bucket/a%20key"
NEW: Final = b"/bucket/a/new%20key"
SECRET: Final = "a secret"
KEY_ID: Final = "AKIDTEST"
EMPTY: Final = sha256(b"").hexdigest()
SLOTS: Final = 1 << 10
SLAB_BYTES: Final = 256 * KIB
CELL: Final = 64 * KIB
GENERATION: Final = 8
RECORDS: Final = [(1, b"the name"), (2, b"the node")]
NAMES: Final = (b"host", b"x-amz-content-sha256", b"x-amz-date")
LINES: Final = b'ETag: "abc"\r\nContent-Type: text/plain\r\n'
SUMS: Final = b"x-amz-checksum-crc32c: AAAAAA==\r\n"
_PIECE: Final = struct.Struct("<Q33s")


def _key(day: str) -> bytes:
    key = b"AWS4" + SECRET.encode()
    for part in (day, "us-east-1", "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


class Taught:
    """The repeater at a door, with one connection: `ask` sends, and returns what the door did."""

    def __init__(self, content: bytes = b"the content", *, memory: int = 1 << 20, buckets: bytes = b"") -> None:
        self.content = content
        self.chunk = b"\x01" + sha256(content).digest()
        self.repeater = Repeater([1000, 1_000_000], memory, 8)
        self.stamps = StampMemory(mmap.mmap(-1, memory_bytes(SLOTS)), (1, 2))
        self.stamps.begin()
        self.table = SharedTable(bytearray(table_bytes(1024)), 1024)
        self.slab = bytearray(SLAB_BYTES)
        self.generations = bytearray(8 * (SLAB_BYTES // (16 * KIB)))
        self.repeater.use_stamps(self.stamps)
        self.repeater.use_places(self.table)
        self.repeater.use_slabs(memoryview(self.generations), SLAB_BYTES, {0: memoryview(self.slab)})
        self.place(content)
        self.repeater.hold_until(time.monotonic() + 1000)
        self.day = time.strftime("%Y%m%d", time.gmtime())
        self.learn_signer(buckets)
        self.learn()
        self.door = Door(self.repeater)
        self.client, self.server = socket.socketpair()

    def close(self) -> None:
        """End the stamps, and close the connection."""
        self.stamps.end()
        self.client.close()
        self.server.close()

    def place(self, content: bytes) -> None:
        """Put content into the cell, and the chunk's place there into the table."""
        vector = b""
        if len(content) > GRANULE_BYTES:
            pieces = range(0, len(content), GRANULE_BYTES)
            vector = b"".join(crc32c(content[at : at + GRANULE_BYTES]).to_bytes(4, "little") for at in pieces)
        self.slab[CELL : CELL + len(content) + len(vector)] = content + vector
        self.set_generation(GENERATION)
        place = pack_place(0, GENERATION)
        assert place is not None
        assert self.table.put(self.chunk, MEDIUM_DRAM, place, CELL, len(content), crc32c(vector or content))

    def set_generation(self, generation: int) -> None:
        """Change the cell's generation."""
        number = CELL // (16 * KIB)
        self.generations[8 * number : 8 * number + 8] = generation.to_bytes(8, "little")

    @property
    def scope(self) -> str:
        return f"{self.day}/us-east-1/s3/aws4_request"

    def claim(self, names: tuple[bytes, ...] = NAMES) -> bytes:
        """Return the Authorization header without its signature."""
        signed = b";".join(names).decode()
        return f"AWS4-HMAC-SHA256 Credential={KEY_ID}/{self.scope}, SignedHeaders={signed}, Signature=".encode()

    def learn_signer(self, buckets: bytes = b"", names: tuple[bytes, ...] = NAMES) -> None:
        assert self.repeater.learn_signer(
            self.claim(names), names, self.scope.encode(), _key(self.day), buckets, b'"%b"' % KEY_ID.encode()
        )

    def learn(
        self, *, of_get: bool = True, target: bytes = TARGET, lines: bytes = LINES, canonical: bytes | None = None
    ) -> None:
        """Teach the object's answer."""
        self.repeater.learn_answer(
            HOST,
            target,
            of_get=of_get,
            canonical_target=target + b"\n" if canonical is None else canonical,
            bucket=b"bucket",
            lines=lines,
            sums=SUMS,
            layout=_PIECE.pack(len(self.content), self.chunk) if self.content else b"",
            size_bytes=len(self.content),
            stamps=self.stamps.of(RECORDS),
            logged=b'"bucket":"bucket","key":"a key"',
        )

    def request(
        self,
        method: str = "GET",
        *,
        target: bytes = TARGET,
        more: Mapping[str, str] = {},
        date: str | None = None,
        content: str = EMPTY,
        secret_day: str | None = None,
        body: bytes = b"",
        names: tuple[bytes, ...] = NAMES,
    ) -> bytes:
        """Return a signed request; `content` is what the signature says of the body."""
        date = date or time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        values = {**more, "host": HOST.decode(), "x-amz-content-sha256": content, "x-amz-date": date}
        lines = "".join(f"{name.decode()}:{values[name.decode()]}\n" for name in names)
        canonical = f"{method}\n{target.decode()}\n\n{lines}\n{b';'.join(names).decode()}\n{content}"
        text = f"AWS4-HMAC-SHA256\n{date}\n{self.scope}\n{sha256(canonical.encode()).hexdigest()}"
        signature = hmac.digest(_key(secret_day or self.day), text.encode(), "sha256").hex()
        headers = {
            "Host": HOST.decode(),
            "X-Amz-Date": date,
            "X-Amz-Content-Sha256": content,
            "Authorization": self.claim(names).decode() + signature,
            **more,
        }
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method.encode(), target, fields.encode(), body)

    def put(
        self,
        body: bytes,
        *,
        target: bytes = NEW,
        more: Mapping[str, str] = {},
        content: str | None = None,
        date: str | None = None,
        length: str | None = None,
        names: tuple[bytes, ...] = NAMES,
    ) -> bytes:
        """Return a signed PUT."""
        hashed = sha256(body).hexdigest() if content is None else content
        headers = {"Content-Length": str(len(body)) if length is None else length, **more}
        return self.request("PUT", target=target, more=headers, content=hashed, date=date, body=body, names=names)

    def held(self, request: bytes) -> Put | None:
        """Return the PUT that the door holds after this request; None if it passed the request on, untouched."""
        assert self.repeater.gathered == 0
        self.door.park(self.server.fileno(), b'"peer"')
        self.client.sendall(request)
        handed = None
        for _ in range(1 + len(request) // 1000):  # a long one comes in parts
            self.door.begin(1_000_000_000)
            handed = handed or self.door.serve()
        if handed is not None:
            descriptor, received, unsent, rest = handed
            assert (descriptor, unsent, rest) == (self.server.fileno(), b"", None)
            assert received is not None
            assert request.startswith(received)
            with suppress(BlockingIOError):
                self.server.recv(1 << 20, socket.MSG_DONTWAIT)
            return None
        (put,) = self.repeater.take_puts(10)
        return put

    def ask(self, request: bytes) -> bytes | None:
        """Return the door's answer; None if it passed the request on, untouched."""
        self.door.park(self.server.fileno(), b'"peer"')
        self.client.sendall(request)
        self.door.begin(1_000_000_000)
        handed = self.door.serve()
        if handed is not None:
            assert handed == (self.server.fileno(), request, b"", None)
            return None
        self.door.leave(self.server.fileno())
        return self.client.recv(1 << 20)

    def narrow(self) -> None:
        """Let the sockets take little at once."""
        self.server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def begin(self, request: bytes) -> None:
        """Send a request, and let the door begin with its answer."""
        self.door.park(self.server.fileno(), b'"peer"')
        self.client.sendall(request)
        self.door.begin(1_000_000_000)
        assert self.door.serve() is None

    def answer(self, request: bytes) -> bytes:
        """Return the door's answer, read in pieces."""
        self.begin(request)
        got = self.client.recv(1 << 20)
        while self.door.is_busy(self.server.fileno()):
            self.door.begin(1_000_000_000)
            assert self.door.serve() is None
            got += self.client.recv(1 << 20)
        self.door.leave(self.server.fileno())
        self.client.setblocking(False)
        with suppress(BlockingIOError):
            got += self.client.recv(1 << 20)
        self.client.setblocking(True)
        return got

    def passed(self) -> dict[str, int]:
        """Return the reasons for passing requests on, and their counts."""
        from gateway.s3.door._repeater import PASSED

        return {name: count for name, count in zip(PASSED, self.repeater.passed, strict=True) if count}
