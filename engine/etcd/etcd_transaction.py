"""A transaction of the port as one of etcd's: its request for each try, and its result from the answer.

    if the marker is as the slot's last transaction left it         (the first try that arrives)
        read the entries of the comparisons                         -> `seen`
        if all comparisons hold     then_ops, put the marker b"T"
        else                        else_ops, put the marker b"E"
    else                                                            (another try was done)
        read the marker                                             -> which branch, at which revision
        put a note beside it, if the transaction puts anything

Rules kept here:
- A branch without operations puts no marker in the first try, so it has no revision.  A repeat puts it always: the
  first try, which may yet arrive, is then not done any more, when a result that it would contradict was returned.
- A *probe* is a repeat without operations: it finds which branch would be done, and fences off the tries before it.
  Its markers are b"t" and b"e".
- Etcd looks for room only if one of the outer operations is a put: hence the note.  So a transaction that only removes
  keys is done when etcd has no room, though it puts a marker; and so is one that notes little beside what it removes.
- A transaction that its caller says may be repeated has no slot and no marker: each try does what it finds to do.  The
  note is in the branch that is not done then.
- Etcd's bound of 128 operations holds for a transaction with those around it: the outer one has two, the comparisons
  and a branch with its marker up to 121 (COORDINATOR_OPERATIONS_MAX, limits.py).

No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.coordinator.coordinator import Compare, Entry, HasRevision, HasValue, Operation, Outcome, Put, Transacted
from engine.coordinator.coordinator_table import bounded
from engine.etcd import etcd_messages as e
from engine.etcd.etcd_session import Slot
from lakefs.ids import LeaseId, Revision

_DONE: Final = {True: b"T", False: b"E"}
_NOTED_BYTES_MAX: Final = 1024
_PROBED: Final = {True: b"t", False: b"e"}


@dataclass(frozen=True)
class Marked:
    """A try that was done: which branch, at which revision, whether as a probe, and the version of its marker."""

    is_held: bool
    is_probe: bool
    revision: Revision
    version: int


@dataclass(frozen=True)
class EtcdTransaction:
    """A transaction of the port, below the prefix of a lake's keys."""

    prefix: bytes
    compares: Sequence[Compare]
    then_ops: Sequence[Operation]
    else_ops: Sequence[Operation]

    @property
    def is_read(self) -> bool:
        """True if it changes nothing, whatever its comparisons are."""
        return not self.then_ops and not self.else_ops

    @property
    def _grows(self) -> bool:
        """True unless it only removes keys, or removes some and notes little about it."""
        operations = (*self.then_ops, *self.else_ops)
        put_bytes = [len(operation.value) for operation in operations if isinstance(operation, Put)]
        return bool(put_bytes) and (len(put_bytes) == len(operations) or sum(put_bytes) > _NOTED_BYTES_MAX)

    def branch(self, is_held: bool) -> Sequence[Operation]:
        """Return the operations of a branch."""
        return self.then_ops if is_held else self.else_ops

    def names_lease(self, is_held: bool) -> bool:
        """Return True if a branch puts a key with a lease."""
        return any(isinstance(operation, Put) and operation.lease for operation in self.branch(is_held))

    def puts_marker(self, is_held: bool, *, is_repeat: bool) -> bool:
        """Return True if a try puts the marker in this branch."""
        return is_repeat or bool(self.branch(is_held))

    # --- requests ----------------------------------------------------------------------------------------

    def request(self, slot: Slot | None, *, is_repeat: bool = False, is_probe: bool = False) -> e.Message:
        """Return the request of a try; without a slot for one that changes nothing, or may be repeated."""
        inner = e.TxnRequest(compare=map(self._compare, self.compares))
        inner.success.extend(self._branch(slot, True, is_repeat, is_probe))
        inner.failure.extend(self._branch(slot, False, is_repeat, is_probe))
        request = e.TxnRequest(success=[self._reads(0), e.EtcdOperation(txn=inner)])
        if slot is not None:
            request.compare.add(result=e.EQUAL, target=e.VERSION, key=slot.key, version=slot.version)
            request.failure.add(range=e.RangeRequest(key=slot.key))
        if not is_probe and self._grows:
            request.failure.append(self._note(slot))
        return request

    def _note(self, slot: Slot | None) -> e.Message:
        if slot is None:
            return e.EtcdOperation(put=e.PutRequest(key=self.prefix + b"note"))
        return e.EtcdOperation(put=e.PutRequest(key=slot.key + b"/found", lease=slot.lease))

    def reads_at(self, revision: Revision) -> e.Message:
        """Return a request that reads the entries of the comparisons as a revision left them."""
        return e.TxnRequest(success=[self._reads(revision)])

    def _reads(self, revision: int) -> e.Message:
        ranges = (e.RangeRequest(key=self.prefix + compare.key, revision=revision) for compare in self.compares)
        return e.EtcdOperation(txn=e.TxnRequest(success=(e.EtcdOperation(range=read) for read in ranges)))

    def _branch(self, slot: Slot | None, is_held: bool, is_repeat: bool, is_probe: bool) -> list[e.Message]:
        operations = [] if is_probe else list(map(self._operation, self.branch(is_held)))
        if slot is not None and self.puts_marker(is_held, is_repeat=is_repeat):
            value = (_PROBED if is_probe else _DONE)[is_held]
            operations.append(e.EtcdOperation(put=e.PutRequest(key=slot.key, value=value, lease=slot.lease)))
        return operations

    def _compare(self, compare: Compare) -> e.Message:
        key = self.prefix + compare.key
        match compare:
            case HasRevision():
                return e.EtcdCompare(result=e.EQUAL, target=e.MOD_REVISION, key=key, mod_revision=compare.revision)
            case HasValue():
                return e.EtcdCompare(result=e.EQUAL, target=e.VALUE, key=key, value=compare.value)
            case _:
                return e.EtcdCompare(result=e.EQUAL, target=e.VERSION, key=key, version=0)

    def _operation(self, operation: Operation) -> e.Message:
        key = self.prefix + operation.key
        if isinstance(operation, Put):
            return e.EtcdOperation(put=e.PutRequest(key=key, value=operation.value, lease=operation.lease))
        return e.EtcdOperation(delete=e.DeleteRequest(key=key))

    # --- answers -----------------------------------------------------------------------------------------

    def result(self, answer: e.Message) -> Transacted:
        """Return the result of a try that was done."""
        is_held = answer.responses[1].txn.succeeded
        return self.result_of(is_held, Revision(answer.header.revision), self.seen(answer))

    def result_of(self, is_held: bool, revision: Revision, seen: tuple[Entry | None, ...]) -> Transacted:
        """Return the result of a branch that was done at a revision."""
        return Transacted(Outcome.DONE if is_held else Outcome.CONFLICT, revision, seen)

    def seen(self, answer: e.Message) -> tuple[Entry | None, ...]:
        """Return the entries of the comparisons, as an answer has them."""
        reads = answer.responses[0].txn.responses
        entries = [entry_of(read.range.kvs[0], self.prefix) if read.range.kvs else None for read in reads]
        assert len(entries) == len(self.compares), "each comparison's key was read"
        return bounded(entries)


def marked(answer: e.Message) -> Marked | None:
    """Return the try that was done before, as an answer's marker says; None if there is no marker."""
    found = answer.responses[0].range.kvs
    if not found:
        return None
    kept = found[0]
    return Marked(kept.value in (b"T", b"t"), kept.value in (b"t", b"e"), Revision(kept.mod_revision), kept.version)


def entry_of(kept: e.Message, prefix: bytes) -> Entry:
    """Return the entry that etcd keeps below a prefix."""
    assert kept.key.startswith(prefix), "what is read is below the prefix"
    return Entry(kept.key[len(prefix) :], kept.value, Revision(kept.mod_revision), LeaseId(kept.lease))
