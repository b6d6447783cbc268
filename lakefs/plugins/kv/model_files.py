"""The identity of a model: of a local one its content, of any other its name.

    local path   names and sizes of its files, all bytes of configurations and code, samples of everything else
    other name   the name, which says nothing of the revision that it stands for

Machines that share a space have a model under other paths, with other times; so neither counts.  Training changes no
configuration and no index, so weights are known by samples of their bytes.

Rules kept here:
- The work is bounded: at most FILES_MAX files, WHOLE_BYTES_MAX of each one that is read whole, SAMPLES_MAX samples.
- Samples are spread over each file by its length: at least SAMPLES_MIN each, and one in each of as many equal pieces.
  Where in its piece a sample lies is drawn from the piece's number, so that no period of a file escapes all of them.
- A file that only has to do with text (tokenizer, template, documentation) does not count: keys are made of tokens.
- What cannot be read is not guessed: such a model is known by its name alone, and the reason is given.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Final

from lakefs.host.work_threads import WorkThreads
from lakefs.limits import KIB, MIB

FILES_MAX: Final = 10_000
"""Most files of a model; the largest that are published have some hundreds."""
WHOLE_BYTES_MAX: Final = 32 * MIB
"""Most bytes of a configuration or an index that are read whole; the index of 100,000 tensors has 12 MB."""
SAMPLES_MAX: Final = 16_384
"""Samples of a whole model: 1.3 s of random reads at 80 us each, a tenth of that with READERS of them at once."""
SAMPLES_MIN: Final = 16
SAMPLE_BYTES: Final = KIB
READERS: Final = 16
_WHOLE: Final = (".json", ".py", ".yaml", ".yml")
_OF_TEXT: Final = frozenset(
    (
        "added_tokens.json",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    )
)
_NOT_COUNTED: Final = (".md", ".txt", ".rst", ".pdf", ".png", ".jpg", ".jpeg", ".svg", ".jinja", ".lock", ".pyc")


@dataclass(frozen=True)
class Model:
    """A model as a space's name has it: `identity`, and a short name for people."""

    identity: str
    label: str
    unseen: str = ""
    """The reason why `identity` is the name alone; empty if it is the content."""


class _File:
    """A file that counts: its name below the model's folder, its path and its status."""

    def __init__(self, name: str, path: str, status: os.stat_result) -> None:
        self.name = name
        self.path = path
        self.status = status
        self.size_bytes = status.st_size

    @property
    def is_whole(self) -> bool:
        return self.name.endswith(_WHOLE) and self.size_bytes <= WHOLE_BYTES_MAX


def model_of(name: str) -> Model:
    """Return the identity of a model that a host calls by this name, or path.  Blocks; raises nothing."""
    label = os.path.basename(name.rstrip("/")) if os.path.isabs(name) else name
    if not os.path.exists(name):
        return Model(f"name {name}", label, "it is no path of this machine")
    try:
        return Model(f"content {_content_of(name)}", label)
    except (OSError, ValueError) as error:
        return Model(f"name {name}", label, f"its files cannot be read: {error}")


def state_of(path: str) -> object:
    """Return what changes when a model's files are written on this machine: names, lengths, times and inodes.

    Blocks; raises nothing.  For comparison alone.
    """
    try:
        return sorted(_statuses_of(path))
    except OSError as error:
        return [str(error)]


def _statuses_of(path: str) -> Iterator[tuple[str, int, int, int]]:
    for file in islice(_files_of(path), FILES_MAX + 1):
        yield file.name, file.status.st_size, file.status.st_mtime_ns, file.status.st_ino


def _content_of(path: str) -> str:
    """Return a digest of a model's files.  OSError; ValueError for what is no model."""
    files = list(islice(_files_of(path), FILES_MAX + 1))
    if not files:
        raise ValueError("there are none")
    if len(files) > FILES_MAX:
        raise ValueError(f"there are more than {FILES_MAX}")
    files.sort(key=lambda file: file.name)
    sampled = sum(file.size_bytes for file in files if not file.is_whole)
    digest = hashlib.sha256()
    readers = WorkThreads(READERS)
    try:
        works = [readers.submit(_digest_of, file, sampled) for file in files]
        for file, work in zip(files, works, strict=True):
            digest.update(f"{len(file.name.encode())} {file.name} {file.size_bytes} ".encode() + work.result())
    finally:
        readers.close()
    return digest.hexdigest()


def _files_of(path: str) -> Iterator[_File]:
    """Iterate over the files that count, below a folder; a file is a model by itself."""
    if not os.path.isdir(path):
        yield _File("", path, os.stat(path))
        return
    for folder, folders, names in os.walk(path, onerror=_fail):
        folders[:] = sorted(name for name in folders if not _is_beside(name))
        for name in names:
            whole = os.path.join(folder, name)
            if _is_beside(name) or name in _OF_TEXT or name.lower().endswith(_NOT_COUNTED):
                continue
            status = os.stat(whole)  # of what a link leads to: repositories of models have links to blobs
            if stat.S_ISREG(status.st_mode):
                yield _File(os.path.relpath(whole, path), whole, status)


def _fail(error: OSError) -> None:
    raise error


def _is_beside(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _digest_of(file: _File, sampled_bytes: int) -> bytes:
    """Return a digest of a file's bytes, or of samples of them; `sampled_bytes`: of all files that are sampled."""
    digest = hashlib.sha256()
    descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        for begin, length in _ranges_of(file, sampled_bytes):
            digest.update(_read(descriptor, begin, length))
    finally:
        os.close(descriptor)
    return digest.digest()


def _ranges_of(file: _File, sampled_bytes: int) -> Iterable[tuple[int, int]]:
    if file.is_whole:
        return ((begin, min(MIB, file.size_bytes - begin)) for begin in range(0, file.size_bytes, MIB))
    share = SAMPLES_MAX * file.size_bytes // max(1, sampled_bytes)
    return places_of(file.size_bytes, max(SAMPLES_MIN, share))


def places_of(size_bytes: int, count: int) -> Sequence[tuple[int, int]]:
    """Return begins and lengths of at most so many samples of a file, ascending: one in each of `count` pieces.

    A file of no more bytes than that has is covered whole.
    """
    if size_bytes <= count * SAMPLE_BYTES:
        return [(begin, min(SAMPLE_BYTES, size_bytes - begin)) for begin in range(0, size_bytes, SAMPLE_BYTES)]
    bounds = [size_bytes * number // count for number in range(count + 1)]
    return [
        (begin + _drawn(number, end - begin - SAMPLE_BYTES), SAMPLE_BYTES)
        for number, (begin, end) in enumerate(pairwise(bounds))
    ]


def _drawn(number: int, most: int) -> int:
    """Return a number from 0 to `most`, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(number.to_bytes(8, "big"), digest_size=8).digest(), "big") % (most + 1)


def _read(descriptor: int, begin: int, length: int) -> bytes:
    """Read bytes of a file.  OSError if they are not all there: it is being written."""
    found = os.pread(descriptor, length, begin)
    while len(found) < length:
        more = os.pread(descriptor, length - len(found), begin + len(found))
        if not more:
            raise OSError("a file became shorter while it was read")
        found += more
    return found
