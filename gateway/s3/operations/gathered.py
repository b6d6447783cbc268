"""PUTs that the door has gathered: each decided as any PUT is, all stored with one request.

Rules kept here:
- The target is parsed, and the rights of the key are checked, by the functions that every request meets.  The header
  fields of a gathered PUT are from a closed list (`fields.h`): a content type and checksums; they are checked here.
- What is refused here, or by the store, is given back: its connection's task finds out again why, and says so.
- The answer to a GET of what was written is taught to the door, with the stamps that the store gave in the same step.
- A request that may have been carried out, though its answer is lost, is not tried again: each PUT of it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from gateway.http.head import RequestHead
from gateway.s3.door.teaching import S3Door, joined_lines, logged_name
from gateway.s3.operations.storing import ETAG_MD5, put_headers
from gateway.s3.protocol import checksums
from gateway.s3.protocol.attributes import attributes_of
from gateway.s3.protocol.errors import S3Error
from gateway.s3.protocol.headers import check_headers
from gateway.s3.protocol.signing import AccessKey
from gateway.s3.protocol.targets import parse_target
from gateway.s3.request.authorization import check_key
from lakefs.errors import InternalError, LakeError, UserError
from lakefs.wire.engine_port import EngineClient
from lakefs.wire.messages import NO_CONDITION, NameChange, NameResults, ObjectStat, PutObjects

if TYPE_CHECKING:
    from gateway.s3.door._repeater import Put

_log: Final = structlog.get_logger(__name__)
_VERSION: Final = (1, 1)
_OBJECT: Final = 2
"""Kind of a stat; a key that ends in "/" is a folder, whose GET is left to Python."""
_read_signer: Final = msgspec.json.Decoder(str).decode


class GatheredPuts:
    """Stores the PUTs of one door."""

    def __init__(
        self, engine: EngineClient, door: S3Door, domains: tuple[str, ...], find_key: Callable[[str], AccessKey | None]
    ) -> None:
        """`domains`: host suffixes that follow a bucket's name.  `find_key` returns the present key pair of a key."""
        self._engine = engine
        self._door = door
        self._domains = domains
        self._find_key = find_key

    async def store(self, puts: Sequence[Put]) -> None:
        """Store PUTs, and answer or give back each of them.  Durable when answered."""
        try:
            await self._store(puts)
        except Exception:  # noqa: BLE001 - a bug, met by these requests
            _log.exception("s3_puts_failed")
            for put in puts:  # those that were answered are not given back
                self._door.give_back(put, InternalError("an error in the gateway"))

    async def _store(self, puts: Sequence[Put]) -> None:
        changes: list[NameChange] = []
        taken: list[Put] = []
        for put in puts:
            change = self._change(put)
            if change is None:
                self._door.give_back(put)
            else:
                changes.append(change)
                taken.append(put)
        if not taken:
            return
        payloads = [memoryview(put) for put in taken]
        request = PutObjects(list(map(len, payloads)), changes, stamps=self._door.is_open)
        try:
            reply = await self._engine.call(request, payloads)
        except UserError:  # nothing was done: one of them is at fault
            for put in taken:
                self._door.give_back(put)
            return
        except LakeError as error:
            for put in taken:
                self._door.give_back(put, error)
            return
        assert isinstance(reply.message, NameResults)
        written: list[tuple[Put, ObjectStat, bytes]] = []
        for put, result in zip(taken, reply.message.results, strict=True):
            stat = result.stat
            if stat is None:
                self._door.give_back(put)
                continue
            name = logged_name(stat.bucket, stat.key) if self._door.is_logging else b""
            self._door.answer(put, joined_lines(put_headers(stat)), name)
            if result.stamps and stat.kind == _OBJECT:
                written.append((put, stat, result.stamps))
        self._door.learn_puts(written, reply.epoch)

    def _change(self, put: Put) -> NameChange | None:
        """Return what a PUT asks for; None if it must not be done."""
        target, headers = put.target, put.headers
        head = RequestHead("PUT", target, target, b"", put.host, _VERSION, headers, keep_alive=True)
        key = self._find_key(_read_signer(put.signer))
        if key is None:
            return None
        try:
            named = parse_target(head, self._domains)
            check_key(key, named)
            check_headers(named.operation, headers)
            sums = _proven_sums(headers, put)
        except S3Error:
            return None
        if not named.key:
            return None
        attributes = attributes_of(headers, etag_kind=ETAG_MD5, etag=put.md5, sums=sums)
        return NameChange(named.bucket, named.key, b"", attributes, NO_CONDITION)


def _proven_sums(headers: Mapping[bytes, bytes], put: Put) -> dict[str, bytes]:
    """Return the checksum to keep with the object, if one was sent.  S3Error if it is malformed, or not the body's."""
    expected = checksums.expected_checksum(headers)
    if expected is None:
        return {}
    running = checksums.start(expected.algorithm)
    running.update(memoryview(put))
    if running.digest() != expected.digest:
        raise checksums.mismatch(expected.algorithm.value)
    return {expected.algorithm.value: expected.digest}
