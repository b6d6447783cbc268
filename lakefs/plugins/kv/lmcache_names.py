"""Keys of LMCache's objects, and the lengths that they have.

    name  MODEL@RANK@GROUP@HASH, or with @SALT behind it: the text by which LMCache knows an object
    key   SHA-256 of the name, or, with a salt or for a model under a local path, of salt, model's content and the rest

A name says nothing of dtype, of overrides, or of which weights a path has: the option `salt` stands for those.  A local
path is known by its content (`lakefs.plugins.kv.model_files`) at its first use.  LMCache outlives the engines that it
serves, and cannot tell which of them has loaded what: once the content has changed, the model's objects are neither
stored nor found until LMCache, whose own memory has them under these names too, is started anew.

Rules kept here:
- Files are looked at on the movers' threads alone, LOOK_S apart: an engine takes longer to load other weights.
- An object's length is that of all objects of its model, rank and group, unless LMCache was seen to use several.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Final

from lakefs.errors import SourceChanged
from lakefs.plugins.kv.model_files import Model, model_of, state_of

LOOK_S: Final = 5.0
"""Seconds between two looks at the files of a model in use."""
MODELS_MAX: Final = 64
KINDS_MAX: Final = 4096
ANY: Final = 0
"""Length of objects of which LMCache uses several, or none yet."""
_SEPARATOR: Final = "@"
_CHANGED: Final = "its files have changed since LMCache first used it; start LMCache anew"
_log: Final = logging.getLogger(__name__)


class _Local:
    """A model under a local path: its content at the first use, and the state of its files at the last look."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._state = state_of(path)
        self.model: Model = model_of(path)
        self.looked_at_s = time.monotonic()
        self.is_changed = False

    def look(self) -> None:
        """Find out if the content has changed; that is found out, and logged, once."""
        state = state_of(self._path)
        if state != self._state and not self.is_changed:
            self.is_changed = model_of(self._path).identity != self.model.identity
            self._state = state
            if self.is_changed:
                _log.warning("Objects of %s are neither stored nor found: %s", self._path, _CHANGED)
        self.looked_at_s = time.monotonic()


class Names:
    """Keys of objects.  Used from any thread."""

    def __init__(self, salt: str) -> None:
        self._salt = salt
        self._lock = threading.Lock()
        """Held while files are looked at."""
        self._local: dict[str, _Local] = {}

    def keys_now(self, names: Sequence[str]) -> list[bytes] | None:
        """Return the keys; None if that takes a look at files, or fails: `keys` then.  Never waits."""
        seen: dict[str, Model] = {}
        for path in _paths_of(names):
            local = self._local.get(path)
            if local is None or local.is_changed or time.monotonic() - local.looked_at_s > LOOK_S:
                return None
            seen[path] = local.model
        return [self._key(name, seen) for name in names]

    def keys(self, names: Sequence[str]) -> list[bytes]:
        """Return the keys.  Reads files at times.  SourceChanged for a model whose content has changed."""
        seen = {path: self._look(path) for path in _paths_of(names)}
        return [self._key(name, seen) for name in names]

    def _look(self, path: str) -> Model:
        with self._lock:
            local = self._local.get(path)
            if local is None:
                if len(self._local) >= MODELS_MAX:
                    self._local.pop(next(iter(self._local)))
                local = self._local[path] = _Local(path)
            elif time.monotonic() - local.looked_at_s > LOOK_S:
                local.look()
        if local.is_changed:
            raise SourceChanged(f"{path}: {_CHANGED}")
        return local.model

    def _key(self, name: str, seen: dict[str, Model]) -> bytes:
        model, _, rest = name.partition(_SEPARATOR)
        local = seen.get(model)
        if local is None and not self._salt:
            return hashlib.sha256(name.encode()).digest()
        identity = model if local is None else local.identity
        text = f"\0{len(self._salt)} {self._salt} {len(identity)} {identity} {rest}"
        return hashlib.sha256(text.encode()).digest()


class Lengths:
    """Lengths of objects, learned from the buffers that LMCache stores and loads.  Used from any thread."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}

    def note(self, names: Sequence[str], buffers: Sequence[memoryview]) -> None:
        """Note that objects of these names have these lengths."""
        for name, buffer in zip(names, buffers, strict=True):
            kind = _kind_of(name)
            if len(self._lengths) >= KINDS_MAX:
                self._lengths.clear()
            known = self._lengths.setdefault(kind, buffer.nbytes)
            if known != buffer.nbytes:
                self._lengths[kind] = ANY

    def of(self, names: Sequence[str]) -> list[int]:
        """Return the length of each object; `ANY` where it is not known."""
        return [self._lengths.get(_kind_of(name), ANY) for name in names]


def _paths_of(names: Sequence[str]) -> set[str]:
    """Return the models of objects that are called by a path: LMCache's folder is not the engine's."""
    models = {name.partition(_SEPARATOR)[0] for name in names}
    return {model for model in models if os.path.isabs(model)}


def _kind_of(name: str) -> str:
    """Return model, rank and group of an object."""
    return _SEPARATOR.join(name.split(_SEPARATOR, 3)[:3])
