"""Random histories of one bucket: changes of every kind that a name can see, from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from lakefs.client.blocking.lake import Lake
from lakefs.errors import LakeError

BUCKET: Final = "bkt"
SIZES: Final = (0, 1, 100, 4096, 65_535, 65_536, 65_537, 200_000)
ROOM: Final = max(SIZES)
KEYS: Final = ("a", "b", "f/a", "f/b", "f/g/a", "h/a")
NAMES: Final = tuple(f"{BUCKET}/{key}" for key in KEYS)
ASKED: Final = (*NAMES, f"lake://{NAMES[0]}", f"{BUCKET}/f/", f"{BUCKET}/f", BUCKET, f"{BUCKET}/", "none/a", "\ud800")
"""All that is asked about after each change: also folders, and names that never are."""


class History:
    """Changes by one writer."""

    def __init__(self, lake: Lake, seed: int) -> None:
        self._lake = lake
        self._chance = random.Random(seed)
        self._is_versioned = False
        self.tried: list[str] = []

    def change(self) -> None:
        """Make one change; one that is refused changes nothing."""
        kinds: tuple[Callable[[], object], ...] = (
            self._put, self._put, self._put, self._put_many, self._remove, self._move, self._move_folder, self._copy,
            self._make_folder, self._set_bucket, self._put_the_same, self._upload,
        )  # fmt: skip
        kind = self._chance.choice(kinds)
        try:
            kind()
        except LakeError as error:
            self.tried.append(f"{kind.__name__}: {error.message}")
        else:
            self.tried.append(kind.__name__)

    def _name(self) -> str:
        return self._chance.choice(NAMES)

    def _content(self) -> bytes:
        return self._chance.randbytes(self._chance.choice(SIZES))

    def _put(self) -> object:
        return self._lake.put(self._name(), self._content(), user_metadata={"n": str(len(self.tried))})

    def _put_the_same(self) -> object:
        return self._lake.put(self._name(), b"the same content each time" * 100)

    def _put_many(self) -> object:
        return self._lake.put_many([(name, self._content()) for name in self._chance.sample(NAMES, 3)])

    def _remove(self) -> object:
        return self._lake.remove(self._name())

    def _move(self) -> object:
        return self._lake.move(self._name(), self._name())

    def _move_folder(self) -> object:
        old, new = self._chance.choice((("f/", "h/f/"), ("h/f/", "f/"), ("f/g/", "f/k/"), ("f/k/", "f/g/")))
        return self._lake.move(f"{BUCKET}/{old}", f"{BUCKET}/{new}")

    def _copy(self) -> object:
        return self._lake.copy(self._name(), self._name())

    def _make_folder(self) -> object:
        return self._lake.make_folder(self._name())

    def _set_bucket(self) -> object:
        if self._chance.random() < 0.5:
            return self._lake.set_bucket(BUCKET, anonymous_read=self._chance.random() < 0.5)
        return self._lake.set_bucket(BUCKET, versioning=self._chance.choice(("enabled", "suspended")))

    def _upload(self) -> object:
        upload = self._lake.create_upload(self._name())
        part = self._lake.put_part(upload, 1, self._content())
        return self._lake.complete_upload(upload, [(1, part.etag)])
