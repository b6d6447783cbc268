"""A model of S3's versions, in memory: what each key of a bucket is bound to, and its old versions.

A version is bound, or old; old ones are listed newest first.  Ids are those that the store returned; ids that it did
not return are learned from its list ("?").  An old `null` version of a key that is bound to another `null` one, which
only the rename of a folder causes, is known by its order (`by_order`) for as long as that lasts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

NULL = "null"
UNKNOWN = "?"


@dataclass(frozen=True)
class Version:
    """A version.  `text` is the content, None for a delete marker."""

    id: str
    text: str | None
    order: int
    by_order: str = UNKNOWN


@dataclass
class Key:
    """One key."""

    bound: Version | None = None
    old: list[Version] = field(default_factory=list)

    @property
    def all(self) -> list[Version]:
        """All versions, newest first, with the ids that they are known by now."""
        if self.bound is None or self.bound.id != NULL:
            return [*([self.bound] if self.bound else []), *self.old]
        return [self.bound, *_without_null(self.old)]

    @property
    def is_deleted(self) -> bool:
        """True when a delete marker is on top."""
        return self.bound is None and bool(self.old) and self.old[0].text is None


class VersionModel:
    """One bucket.  `versioning`: "", "enabled", "suspended"."""

    def __init__(self) -> None:
        self.versioning = ""
        self.keys: dict[str, Key] = {}
        self._orders = 0

    def of(self, key: str) -> Key:
        """Return a key, also one that never existed."""
        return self.keys.setdefault(key, Key())

    def put(self, key: str, text: str, version: str) -> None:
        """Bind the key to a new version with this id."""
        if key.endswith("/"):
            self.keys[key] = Key(self._new(NULL, text))
            return
        self._make_room(key)
        self.of(key).bound = self._new(version, text)

    def delete(self, key: str, marker: str) -> None:
        """Delete without a version; the delete marker has this id."""
        if key.endswith("/") or not self.versioning:
            self.keys.pop(key, None)
            return
        self._make_room(key)
        self.of(key).bound = None
        self._keep(key, self._new(marker, None))

    def delete_version(self, key: str, version: str) -> None:
        """Remove a version for good."""
        found = self.of(key)
        was_deleted = found.is_deleted
        if found.bound is not None and found.bound.id == version:
            found.bound = None
            self._bind_newest(found)
            return
        newest = found.old[0] if found.old else None
        gone = {one.order for one in found.all if one.id == version}
        found.old = [old for old in found.old if old.order not in gone]
        if was_deleted and newest not in found.old:
            self._bind_newest(found)

    def move(self, key: str, to_key: str, version: str) -> None:
        """Move an object, which gets this id."""
        if key == to_key:
            return
        moved = self.of(key).bound
        assert moved is not None
        assert moved.text is not None
        self.of(key).bound = None
        self.put(to_key, moved.text, version)
        if self.of(key).old:
            self._keep(key, self._new(UNKNOWN, None))

    def move_folder(self, key: str, to_key: str) -> None:
        """Move what the names in a folder are bound to."""
        for name in [name for name in self.keys if name.startswith(key)]:
            moved = self.keys[name].bound
            if moved is not None:
                self.keys[name].bound = None
                self.of(to_key + name[len(key) :]).bound = moved

    def _make_room(self, key: str) -> None:
        found = self.of(key)
        if not self.versioning:
            found.bound = None
            return
        bound, found.bound = found.bound, None
        if self.versioning == "suspended" and bound is not None and bound.id == NULL:
            found.old = _without_null(found.old)
        elif bound is not None:
            self._keep(key, bound)
        if self.versioning == "suspended" and not (bound is not None and bound.id == NULL):
            found.old = [old for old in found.old if old.id != NULL]

    def _keep(self, key: str, version: Version) -> None:
        found = self.of(key)
        if version.id == NULL:
            found.old = _without_null(found.old)
        found.old.append(version)
        found.old.sort(key=lambda old: -old.order)

    @staticmethod
    def _bind_newest(found: Key) -> None:
        if found.old and found.old[0].text is not None:
            found.bound = found.old.pop(0)

    def _new(self, version: str, text: str | None) -> Version:
        self._orders += 1
        return Version(version or NULL, text, self._orders)


def _without_null(old: list[Version]) -> list[Version]:
    """Return the versions, with the order as the id of a `null` one beside another one."""
    return [replace(one, id=one.by_order) if one.id == NULL else one for one in old]
