"""Old versions in the model: names of a bucket that no client can make, beside the real ones.

    bucket, key, position     an old version of a key, from the oldest; a delete marker has neither blob nor target

Another such bucket has, under a bucket's name, its setting.  Orders are the engine's: what a request binds or marks has
none (0) until the witness has seen which one it got (`fill`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from lakefs.errors import LakeError, VersionNotFound
from tests.sim.judges.state import NO_BLOB, Bound, State

VERSIONS: Final = "\0versions"
SETTINGS: Final = "\0versioning"
NULL: Final = "null"


def setting(state: State, bucket: str) -> str:
    """Return a bucket's versioning: "", "enabled", "suspended"."""
    found = state.get(SETTINGS, {}).get(bucket)
    return "" if found is None else found.mark.decode()


def with_setting(state: State, bucket: str, versioning: str) -> State:
    """Return the state with the setting; "" when the bucket is removed."""
    settings = {name: bound for name, bound in state.get(SETTINGS, {}).items() if name != bucket}
    if versioning:
        settings[bucket] = Bound(NO_BLOB, mark=versioning.encode())
    return _with(state, SETTINGS, settings)


def keeps(state: State, bucket: str, key: str) -> bool:
    """Return whether the versions of a key are kept."""
    return bool(setting(state, bucket)) and not key.endswith("/")


def old_of(state: State, bucket: str, key: str) -> list[Bound]:
    """Return the versions of a key that it is not bound to, newest first."""
    begin = f"{bucket}\0{key}\0"
    names = [name for name in state.get(VERSIONS, {}) if name.startswith(begin)]
    return [state[VERSIONS][name] for name in sorted(names, reverse=True)]


def with_old(state: State, bucket: str, key: str, old: Sequence[Bound]) -> State:
    """Return the state with these versions of a key."""
    begin = f"{bucket}\0{key}\0"
    others = {name: b for name, b in state.get(VERSIONS, {}).items() if not name.startswith(begin)}
    others |= {f"{begin}{position:05}": bound for position, bound in enumerate(reversed(old))}
    return _with(state, VERSIONS, others)


def has_old(state: State, bucket: str) -> bool:
    """Return whether a bucket has old versions."""
    return any(name.startswith(bucket + "\0") for name in state.get(VERSIONS, {}))


def is_marker(bound: Bound) -> bool:
    """Return whether an old version is a delete marker."""
    return not bound.blob and not bound.target


def is_deleted(state: State, bucket: str, key: str) -> bool:
    """Return whether a key that does not exist has a delete marker on top."""
    old = old_of(state, bucket, key) if keeps(state, bucket, key) else []
    return bool(old) and is_marker(old[0])


def put(state: State, bucket: str, key: str, bound: Bound) -> State:
    """Bind a key to a new version."""
    is_null = setting(state, bucket) != "enabled" or key.endswith("/")
    if keeps(state, bucket, key):
        state = _make_room(state, bucket, key)
    return bind(state, bucket, key, bound._replace(is_null=is_null, order=0))


def bind(state: State, bucket: str, key: str, bound: Bound) -> State:
    """Bind a key, whatever it was bound to."""
    return {**state, bucket: {**state.get(bucket, {}), key: bound}}


def mark_deleted(state: State, bucket: str, key: str) -> State:
    """Put a delete marker on top of a key's versions."""
    state = _unbound(_make_room(state, bucket, key), bucket, key)
    marker = Bound(NO_BLOB, is_null=setting(state, bucket) != "enabled")
    return with_old(state, bucket, key, _kept(old_of(state, bucket, key), marker))


def mark_moved(state: State, bucket: str, key: str) -> State:
    """Put a delete marker on top after the key's value was moved away, if other versions are left."""
    old = old_of(state, bucket, key) if keeps(state, bucket, key) else []
    return with_old(state, bucket, key, [Bound(NO_BLOB, is_null=False), *old]) if old else state


def find(state: State, bucket: str, key: str, version: str) -> Bound | type[LakeError]:
    """Return the version of an id."""
    bound = state[bucket].get(key)
    if not keeps(state, bucket, key):
        return bound if bound is not None and version == NULL else VersionNotFound
    found = [bound] if bound is not None else []
    found += old_of(state, bucket, key)
    return next((one for one in found if is_version(one, version)), VersionNotFound)


def delete_version(state: State, bucket: str, key: str, version: str) -> tuple[State, Bound | None]:
    """Return the state without the version of an id, and what that was; in a bucket that keeps versions."""
    bound, old = state[bucket].get(key), old_of(state, bucket, key)
    if bound is not None and is_version(bound, version):
        return _with_newest_bound(_unbound(state, bucket, key), bucket, key), bound
    found = next((one for one in old if is_version(one, version)), None)
    if found is None:
        return state, None
    was_on_top = bound is None and is_marker(found) and old[0] == found
    state = with_old(state, bucket, key, [one for one in old if one != found])
    if was_on_top:
        state = _with_newest_bound(state, bucket, key)
    return state, None if is_marker(found) else found


def id_of(bound: Bound, *, beside_null: bool = False) -> str:
    """Return the id of a version; a `null` one beside a bound one that is `null`, too, has its order as id."""
    return NULL if bound.is_null and not beside_null else f"{bound.order:016x}"


def is_version(bound: Bound, version: str) -> bool:
    """Return whether a version has that id; one that is `null` is known by its order, too."""
    return version in (id_of(bound), id_of(bound, beside_null=True))


def fill(state: State, bucket: str, key: str, seen: Sequence[tuple[int, bool]]) -> State | None:
    """Return the state with the orders of a key's versions, the bound one first; None when they do not fit."""
    bound = state.get(bucket, {}).get(key)
    versions = ([] if bound is None else [bound]) + old_of(state, bucket, key)
    if len(versions) != len(seen):
        return None
    filled: list[Bound] = []
    for version, (order, is_null) in zip(versions, seen, strict=True):
        if version.is_null != is_null or version.order not in (0, order):
            return None
        filled.append(version._replace(order=order))
    if bound is not None:
        state = bind(state, bucket, key, filled.pop(0))
    return with_old(state, bucket, key, filled)


def listed(state: State, bucket: str) -> list[tuple[str, str, bool]]:
    """Return key, id, and whether it is a delete marker, of all versions of a bucket."""
    begin = bucket + "\0"
    keys = {name.split("\0")[1] for name in state.get(VERSIONS, {}) if name.startswith(begin)}
    found: list[tuple[str, str, bool]] = []
    for key in sorted(keys | state[bucket].keys(), key=str.encode):
        bound = state[bucket].get(key)
        if bound is not None:
            kept = bool(setting(state, bucket)) and not key.endswith("/")
            found.append((key, id_of(bound) if kept or not bound.is_null else NULL, False))
        beside_null = bound is not None and bound.is_null
        found += [(key, id_of(old, beside_null=beside_null), is_marker(old)) for old in old_of(state, bucket, key)]
    return found


def _make_room(state: State, bucket: str, key: str) -> State:
    bound, old = state[bucket].get(key), old_of(state, bucket, key)
    if setting(state, bucket) == "enabled":
        return state if bound is None else with_old(state, bucket, key, _kept(old, bound))
    if bound is not None and bound.is_null:
        return with_old(state, bucket, key, _without_null(old))
    if bound is not None:
        old = _kept(old, bound)
    return with_old(state, bucket, key, [one for one in old if not one.is_null])


def _kept(old: Sequence[Bound], bound: Bound) -> list[Bound]:
    """Return the old versions with one more: on top when its order is not known yet."""
    old = _without_null(old) if bound.is_null else list(old)
    place = 0
    if bound.order:
        place = next((i for i, one in enumerate(old) if 0 < one.order < bound.order), len(old))
    return [*old[:place], bound, *old[place:]]


def _without_null(old: Sequence[Bound]) -> list[Bound]:
    """Return the old versions, with an ordinary id for one that was `null`."""
    return [one._replace(is_null=False) for one in old]


def _with_newest_bound(state: State, bucket: str, key: str) -> State:
    old = old_of(state, bucket, key)
    if not old or is_marker(old[0]):
        return state
    return bind(with_old(state, bucket, key, old[1:]), bucket, key, old[0])


def _unbound(state: State, bucket: str, key: str) -> State:
    return {**state, bucket: {name: bound for name, bound in state[bucket].items() if name != key}}


def _with(state: State, name: str, content: Mapping[str, Bound]) -> State:
    others = {bucket: keys for bucket, keys in state.items() if bucket != name}
    return {**others, name: content} if content else others
