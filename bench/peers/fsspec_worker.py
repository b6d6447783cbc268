"""`python -m bench.peers.fsspec_worker`: one side's program that uses fsspec, in its own process.

The first line on its standard input says which file system, every other one is an order: a method of `Worker` and its
arguments.  Each is answered by a line: the seconds that it took and what it returned, or its failure.  All sides run
these same methods, on the same files.  Output of a library is redirected to standard error.

It runs with the Python of whatever environment has the libraries, so it imports only what its orders need.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import fsspec

MIB: Final = 1 << 20
RANGES: Final = 64
RANGE_BYTES: Final = 64 << 10
SMALL: Final = 200
SMALL_BYTES: Final = 4 << 10
TENSORS: Final = 64


class Worker:
    """A file system, and its files below `root`."""

    def __init__(self, protocol: str, root: str, options: dict[str, Any], *, is_checked: bool) -> None:
        """`is_checked`: each read is followed by the check that the lake makes, for a file system without one."""
        self._fs = fsspec.filesystem(protocol, **options)
        self._protocol = protocol
        self._root = root
        self._checked: Callable[[bytes], object] = lambda content: content
        if is_checked:
            self._checked = importlib.import_module("lakefs.content.verify").granule_crcs
        self._state: dict[str, Any] = {}
        self._new_bytes = 0

    def fill(self, source: str) -> None:
        """Store the file `big`, which is read back and compared, and the small ones."""
        content = Path(source).read_bytes()
        self._fs.makedirs(f"{self._root}/small", exist_ok=True)
        self._fs.pipe(f"{self._root}/big", content)
        self._fs.pipe({path: os.urandom(SMALL_BYTES) for path in self._small()})
        if self._fs.cat(f"{self._root}/big") != content:
            raise RuntimeError("the bytes are not what was stored")

    def read(self) -> int:
        """Open `big` and read it by 1 MiB; return its length."""
        total = 0
        with self._fs.open(f"{self._root}/big", "rb") as file:
            while content := file.read(MIB):
                self._checked(content)
                total += len(content)
        return total

    def ranges(self) -> int:
        """Read short ranges of `big`, at random, with one call; return their bytes in all."""
        size = self._fs.size(f"{self._root}/big")
        starts = [random.Random(number).randrange(size - RANGE_BYTES) for number in range(RANGES)]
        ends = [start + RANGE_BYTES for start in starts]
        found = self._fs.cat_ranges([f"{self._root}/big"] * RANGES, starts, ends, on_error="raise")
        for content in found:
            self._checked(content)
        return sum(map(len, found))

    def small(self) -> int:
        """Read the small files with one call; return their bytes in all."""
        found = self._fs.cat(self._small())
        return sum(map(len, found.values()))

    def get(self, target: str) -> int:
        """Fetch `big` into a local file; return its length."""
        self._fs.get_file(f"{self._root}/big", target)
        return os.path.getsize(target)

    def tensors(self, size_bytes: int) -> None:
        """Make a model of `TENSORS` tensors, to be saved; note the bytes that are new to the lake."""
        torch = importlib.import_module("torch")
        self._state = {f"layer{number}": torch.randn(size_bytes // TENSORS // 4) for number in range(TENSORS)}
        if self._protocol == "lake":
            for module, owner, name in (
                ("lakefs.put.pieces", "PiecewisePut", "commit"),
                ("lakefs.client.blocking.object_writer", "", "put"),
            ):
                found = importlib.import_module(module)
                self._note_new_bytes(getattr(found, owner) if owner else found, name)

    def change(self, share: float) -> int:
        """Change whole tensors, at least this share of all, from somewhere on; return how many bytes these are."""
        count = max(1, -int(-share * TENSORS // 1))
        first = random.randrange(TENSORS)
        chosen = [list(self._state.values())[(first + number) % TENSORS] for number in range(count)]
        for tensor in chosen:
            tensor.add_(1.0)
        return sum(tensor.numel() * tensor.element_size() for tensor in chosen)

    def save(self) -> int:
        """Save the model by torch.distributed.checkpoint; return the bytes that were new to the lake."""
        self._new_bytes = 0
        checkpoint = importlib.import_module("torch.distributed.checkpoint")
        place = f"lake://{self._root}" if self._protocol == "lake" else self._root
        checkpoint.save(self._state, checkpoint_id=f"{place}/checkpoint")
        return self._new_bytes

    def loads(self) -> bool:
        """Load the checkpoint; return True if it is the model."""
        torch = importlib.import_module("torch")
        found = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        place = f"lake://{self._root}" if self._protocol == "lake" else self._root
        importlib.import_module("torch.distributed.checkpoint").load(found, checkpoint_id=f"{place}/checkpoint")
        return all(torch.equal(found[name], tensor) for name, tensor in self._state.items())

    def collect(self) -> None:
        """Free what the lake does not need any more."""
        if self._protocol == "lake":
            self._fs.lake.gc()

    def _small(self) -> list[str]:
        return [f"{self._root}/small/{number}" for number in range(SMALL)]

    def _note_new_bytes(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def noted(*args: Any) -> Generator[Any, Any, Any]:
            result = yield from plain(*args)
            self._new_bytes += result.new_bytes
            return result

        setattr(owner, name, noted)


@contextmanager
def _answers() -> Iterator[Any]:
    """Context manager: the standard output as it was; what else is printed goes to standard error."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        yield answers


def main() -> int:
    """Serve orders until standard input ends."""
    with _answers() as answers:
        worker: Worker | None = None
        for line in sys.stdin:
            try:
                order = json.loads(line)
                begin = time.perf_counter()
                if worker is None:
                    worker, result = Worker(**order), None
                else:
                    result = getattr(worker, order.pop("do"))(**order)
                answer = {"elapsed_s": time.perf_counter() - begin, "result": result, "failed": ""}
            except Exception as error:  # noqa: BLE001 - sent to the parent, which reports it
                answer = {"elapsed_s": 0.0, "result": None, "failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
