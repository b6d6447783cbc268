"""The state of a simulated etcd, and its answers to the messages of etcd's API: one object for all of its nodes.

    answer = etcd.answer(TXN, request)      done whole, in one step: so it is linearizable
    watch = etcd.watch(create)              its responses, in order, wait in it until they are taken

It behaves as Debian's 3.4.23 does, as far as the product looks (`tests/contract` runs over both):
- A transaction chooses its branches, nested ones too, before it does anything; of the branches that it chose it refuses
  a lease that does not exist, and a read of what is compacted.  It looks for room only by puts of its outer branches.
- A transaction, or the end of a lease, that changes a key has the next revision; any other has none.
- Compaction at a revision keeps each key's last version at it, unless that is a removal.  So a watch from that very
  revision is accepted, and misses what was removed at it.
- A watch that has seen everything is handed each change, and holds it, though it is compacted: HELD_MAX of them.
- Its file does not shrink by compaction, and the quota is for the file: at it, what grows is refused until the file was
  defragmented and the alarm disarmed.

Nodes, ways and faults are in `tests.sim.cluster.etcd_nodes`.  Nothing here waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import grpc
import trio

from engine.etcd import etcd_messages as e
from engine.etcd.etcd_link import ALARM, COMPACT, DEFRAGMENT, GRANT, KEEP_ALIVE, RANGE, REVOKE, TXN, Method
from engine.etcd.etcd_status import Status

HELD_MAX: Final = 1000
"""Responses that wait in a watch; behind them it reads on from what is not compacted."""
_KEY_BYTES: Final = 100
"""Counted for a version beside its key and value."""
_LEASE_S_MIN: Final = 2
_Code = grpc.StatusCode
COMPACTED: Final = Status(_Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision has been compacted")
TO_COME: Final = Status(_Code.OUT_OF_RANGE, "etcdserver: mvcc: required revision is a future revision")
NO_LEASE: Final = Status(_Code.NOT_FOUND, "etcdserver: requested lease not found")
LEASE_EXISTS: Final = Status(_Code.FAILED_PRECONDITION, "etcdserver: lease already exists")
NO_SPACE: Final = Status(_Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded")


class Version(NamedTuple):
    """A key as one revision left it; `value` is None if that removed it."""

    key: bytes
    value: bytes | None
    revision: int
    created: int = 0
    puts: int = 0
    """Times that it was put since it exists."""
    lease: int = 0

    @property
    def cost_bytes(self) -> int:
        return _KEY_BYTES + len(self.key) + len(self.value or b"")


class _Lease:
    """A lease: its whole time, its end, and its keys in the order in which they were put."""

    def __init__(self, ttl_s: int) -> None:
        self.ttl_s = max(ttl_s, _LEASE_S_MIN)
        self.keys: dict[bytes, None] = {}
        self.renew()

    def renew(self) -> None:
        self.deadline = trio.current_time() + self.ttl_s


class _Plan(NamedTuple):
    """The branch of a transaction that is done, with the plans of the transactions inside of it."""

    is_held: bool
    operations: Sequence[Any]
    inner: Sequence[_Plan | None]

    def flat(self) -> Iterator[Any]:
        """Yield all operations, without the transactions around them."""
        for operation, plan in zip(self.operations, self.inner, strict=True):
            if plan is None:
                yield operation
            else:
                yield from plan.flat()


class SimEtcd:
    """Keys with their versions, leases and watches."""

    def __init__(self, *, quota_bytes: int | None = None) -> None:
        self.revision = 1
        self.compacted = 0
        self.term = 2
        """Raised by each election; in each answer."""
        self.size_bytes = 0
        """Taken by versions that are not compacted."""
        self.file_bytes = 0
        """The most that they have taken since the file was defragmented."""
        self.is_full = False
        """The alarm NOSPACE."""
        self.quota_bytes = quota_bytes
        self.watches: dict[EtcdWatching, None] = {}
        self._keys: list[bytes] = []
        self._versions: dict[bytes, list[Version]] = {}
        self._changes: dict[int, list[Version]] = {}
        """Each revision that is held."""
        self._leases: dict[int, _Lease] = {}
        self._answers: dict[Method, Callable[[Any], Any]] = {
            RANGE: self._range,
            TXN: self._transact,
            COMPACT: self._compact,
            GRANT: self._grant,
            REVOKE: self._revoke,
            KEEP_ALIVE: self._keep_alive,
            ALARM: self._alarm,
            DEFRAGMENT: self._defragmented,
        }

    def answer(self, method: Method, request: Any, member: int = 1) -> e.Message | Status:
        """Do a request, and return its answer, or the status that refuses it: then nothing was done."""
        answer = self._answers[method](request)
        if not isinstance(answer, Status):
            answer.header.member_id, answer.header.raft_term = member, self.term
            answer.header.revision = self.revision
        return answer

    def watch(self, create: Any) -> EtcdWatching:
        """Begin a watch; `forget` it at its end."""
        watch = EtcdWatching(self, create.key, create.range_end, create.start_revision or self.revision + 1)
        self.watches[watch] = None
        watch.fill()
        return watch

    def forget(self, watch: EtcdWatching) -> None:
        """End a watch."""
        self.watches.pop(watch, None)

    def end_leases(self) -> None:
        """End the leases whose time is over."""
        now = trio.current_time()
        for lease in [lease for lease, found in self._leases.items() if found.deadline <= now]:
            self._end_lease(lease)

    def elect(self) -> None:
        """Have another leader: all leases run for their whole time again."""
        self.term += 1
        for lease in self._leases.values():
            lease.renew()

    def defragment(self) -> None:
        """Let the file have only what is not compacted."""
        self.file_bytes = self.size_bytes

    def disarm(self) -> None:
        """End the alarm; the next request that grows raises it again if the file is as large as before."""
        self.is_full = False

    def _alarm(self, request: Any) -> Any:
        if request.action == e.DISARM:
            self.disarm()
        answer = e.AlarmResponse()
        if self.is_full:
            answer.alarms.add(member_id=1, alarm=e.NO_SPACE)
        return answer

    def _defragmented(self, request: Any) -> Any:
        self.defragment()
        return e.DefragmentResponse()

    def note_progress(self) -> None:
        """Let each watch that has seen everything say up to which revision."""
        for watch in self.watches:
            watch.note_progress()

    # --- reads -------------------------------------------------------------------------------------------

    def changes_of(self, revision: int, begin: bytes, end: bytes) -> list[Version]:
        """Return what a revision changed in a range, as far as it is held."""
        return [version for version in self._changes.get(revision, ()) if begin <= version.key < end]

    def current(self, key: bytes, revision: int = 0) -> Version | None:
        """Return a key as it is, or was at a revision; None if it is absent."""
        for version in reversed(self._versions.get(key, ())):
            if not revision or version.revision <= revision:
                return version if version.value is not None else None
        return None

    def _range(self, request: Any) -> Any:
        refused = self._refused_read(request)
        if refused is not None:
            return refused
        answer = e.RangeResponse()
        end = request.range_end or request.key + b"\0"
        for key in self._keys[bisect_left(self._keys, request.key) : bisect_left(self._keys, end)]:
            found = self.current(key, request.revision)
            if found is None or request.count_only:
                continue
            if request.limit and len(answer.kvs) == request.limit:
                answer.more = True
                break
            _write(answer.kvs.add(), found)
        return answer

    def _refused_read(self, request: Any) -> Status | None:
        if request.revision > self.revision:
            return TO_COME
        return COMPACTED if 0 < request.revision < self.compacted else None

    # --- transactions ------------------------------------------------------------------------------------

    def _transact(self, request: Any) -> Any:
        plan = self._plan(request)
        refused = self._refused(request, plan)
        if refused is not None:
            return refused
        changed: list[Version] = []
        answer = self._done(plan, changed)
        self._record(changed)
        return answer

    def _plan(self, request: Any) -> _Plan:
        is_held = all(map(self._holds, request.compare))
        operations = request.success if is_held else request.failure
        inner = [self._plan(each.txn) if each.WhichOneof("request") == "txn" else None for each in operations]
        return _Plan(is_held, operations, inner)

    def _holds(self, compare: Any) -> bool:
        assert compare.result == e.EQUAL, "nothing else is used"
        found = self.current(compare.key)
        if compare.target == e.VALUE:
            return found is not None and found.value == compare.value
        if compare.target == e.VERSION:
            return (0 if found is None else found.puts) == int(compare.version)
        return (0 if found is None else found.revision) == int(compare.mod_revision)

    def _refused(self, request: Any, plan: _Plan) -> Status | None:
        """Return why nothing of a plan is done; None if it is."""
        cost = max(map(_cost_bytes, (request.success, request.failure)))
        if not self._has_room(cost):
            return NO_SPACE
        for operation in plan.flat():
            kind = operation.WhichOneof("request")
            if kind == "put" and operation.put.lease and operation.put.lease not in self._leases:
                return NO_LEASE
            refused = self._refused_read(operation.range) if kind == "range" else None
            if refused is not None:
                return refused
        return None

    def _has_room(self, cost: int) -> bool:
        """Return False if a request would grow what has no room; raises the alarm."""
        if cost and self.quota_bytes is not None and self.file_bytes + cost > self.quota_bytes:
            self.is_full = True
        return not (cost and self.is_full)

    def _done(self, plan: _Plan, changed: list[Version]) -> Any:
        answer = e.TxnResponse(succeeded=plan.is_held)
        for operation, inner in zip(plan.operations, plan.inner, strict=True):
            result = answer.responses.add()
            kind = operation.WhichOneof("request")
            if inner is not None:
                result.txn.CopyFrom(self._done(inner, changed))
            elif kind == "range":
                result.range.CopyFrom(self._range(operation.range))
            elif kind == "put":
                changed.append(self._put(operation.put))
            else:
                changed.extend(self._removed(operation.delete.key))
        return answer

    def _put(self, put: Any) -> Version:
        before, revision = self.current(put.key), self.revision + 1
        created, puts = (revision, 0) if before is None else (before.created, before.puts)
        version = Version(put.key, put.value, revision, created, puts + 1, put.lease)
        self._detach(before)
        if put.lease:
            self._leases[put.lease].keys[put.key] = None
        self._keep(version)
        return version

    def _removed(self, key: bytes) -> list[Version]:
        before = self.current(key)
        if before is None:
            return []
        self._detach(before)
        self._keep(Version(key, None, self.revision + 1))
        return [Version(key, None, self.revision + 1)]

    def _detach(self, version: Version | None) -> None:
        if version is not None and version.lease in self._leases:
            del self._leases[version.lease].keys[version.key]

    def _keep(self, version: Version) -> None:
        if version.key not in self._versions:
            insort(self._keys, version.key)
        self._versions.setdefault(version.key, []).append(version)
        self.size_bytes += version.cost_bytes
        self.file_bytes = max(self.file_bytes, self.size_bytes)

    def _record(self, changed: list[Version]) -> None:
        """Give what was changed its revision, and hand it to the watches."""
        if changed:
            self.revision += 1
            assert all(version.revision == self.revision for version in changed), "they were made for it"
            self._changes[self.revision] = changed
            for watch in self.watches:
                watch.fill()

    # --- compaction --------------------------------------------------------------------------------------

    def _compact(self, request: Any) -> Any:
        if request.revision <= self.compacted:
            return COMPACTED
        if request.revision > self.revision:
            return TO_COME
        self.compacted = request.revision
        for key in list(self._keys):
            self._compact_key(key)
        for revision in [revision for revision in self._changes if revision <= self.compacted]:
            del self._changes[revision]
        at_it = [held[0] for held in self._versions.values() if held[0].revision == self.compacted]
        if at_it:
            self._changes[self.compacted] = at_it
        return e.CompactResponse()

    def _compact_key(self, key: bytes) -> None:
        versions = self._versions[key]
        older = [version for version in versions if version.revision <= self.compacted]
        kept = versions[len(older) :]
        if older and older[-1].value is not None:
            kept.insert(0, older.pop())
        self.size_bytes -= sum(version.cost_bytes for version in older)
        if kept:
            self._versions[key] = kept
        else:
            del self._versions[key]
            del self._keys[bisect_left(self._keys, key)]

    # --- leases ------------------------------------------------------------------------------------------

    def _grant(self, request: Any) -> Any:
        if request.id in self._leases:
            return LEASE_EXISTS
        if not self._has_room(_KEY_BYTES):
            return NO_SPACE
        self._leases[request.id] = lease = _Lease(request.ttl)
        return e.GrantResponse(id=request.id, ttl=lease.ttl_s)

    def _keep_alive(self, request: Any) -> Any:
        lease = self._leases.get(request.id)
        if lease is not None and lease.deadline <= trio.current_time():
            self._end_lease(request.id)
            lease = None
        if lease is not None:
            lease.renew()
        return e.KeepAliveResponse(id=request.id, ttl=0 if lease is None else lease.ttl_s)

    def _revoke(self, request: Any) -> Any:
        if request.id not in self._leases:
            return NO_LEASE
        self._end_lease(request.id)
        return e.RevokeResponse()

    def _end_lease(self, lease: int) -> None:
        changed = [version for key in list(self._leases[lease].keys) for version in self._removed(key)]
        assert not self._leases[lease].keys, "its keys were removed"
        del self._leases[lease]
        self._record(changed)


class EtcdWatching:
    """A watch at the server: the responses that wait to be taken."""

    def __init__(self, etcd: SimEtcd, begin: bytes, end: bytes, next_revision: int) -> None:
        self.woken = trio.Event()
        """Set when a response waits that did not before."""
        self.is_ended = False
        self._etcd = etcd
        self._range = begin, end or begin + b"\0"
        self._next = next_revision
        self._held: deque[Any] = deque()
        self._hold(created=True)

    def take(self) -> e.Message | None:
        """Return the next response, if there is one."""
        if not self._held:
            self.woken = trio.Event()
            return None
        response = self._held.popleft()
        self.fill()
        return response

    def fill(self) -> None:
        """Hold what is behind, as far as there is room for it."""
        etcd = self._etcd
        while not self.is_ended and self._next <= etcd.revision and len(self._held) < HELD_MAX:
            if self._next < etcd.compacted:
                self.is_ended = True
                self._hold(canceled=True, compact_revision=etcd.compacted)
                break
            changed = etcd.changes_of(self._next, *self._range)
            self._next += 1
            if changed:
                self._hold_parts(changed)

    def note_progress(self) -> None:
        """Hold a response without events, if none is held."""
        if not self._held and not self.is_ended and self._next == self._etcd.revision + 1:
            self._hold()

    def _hold_parts(self, changed: list[Version]) -> None:
        """Hold a revision in two parts, as etcd splits what is long; one change is one part."""
        half = len(changed) // 2
        for part in filter(None, (changed[:half], changed[half:])):
            response = self._hold(fragment=part[-1] is not changed[-1])
            for version in part:
                event = response.events.add(type=e.IS_DELETED if version.value is None else 0)
                _write(event.kv, version)

    def _hold(self, **fields: Any) -> e.Message:
        response = e.WatchResponse(**fields)
        response.header.revision = self._etcd.revision
        self._held.append(response)
        self.woken.set()
        return response


def _write(kept: Any, version: Version) -> None:
    kept.key, kept.mod_revision = version.key, version.revision
    kept.value, kept.create_revision = version.value or b"", version.created
    kept.version, kept.lease = version.puts, version.lease


def _cost_bytes(operations: Sequence[Any]) -> int:
    """Return what the puts of a branch cost, without those of transactions inside of it."""
    puts = (operation.put for operation in operations if operation.WhichOneof("request") == "put")
    return sum(_KEY_BYTES + len(put.key) + len(put.value) for put in puts)
