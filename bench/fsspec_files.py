"""Measure `lake://` beside `file://` through fsspec, and a checkpoint of torch beside a local folder.

    .venv/bin/python -m bench.fsspec_files [--rounds 7] [--folder DIR]

Rounds of all are interleaved, and medians are printed: seconds, and lake divided by file.  The folder holds the store
and the local files, on one disk; page caches are warm.  Writes of the lake are durable when they return, so local
files are written with fsync, and without it.  Reads of the lake are checked, those of files are not.  Where
`.venv-plugins` has torch, run with its Python to measure checkpoints, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import fsspec

from lakefs.plugins.fsspec.file_system import LakeFileSystem
from tests.e2e.served import serving

MIB: Final = 1 << 20
BIG: Final = 256 * MIB
CHECKPOINT: Final = 512 * MIB
Action = Callable[[], object]


def _reads(fs: Any, root: str, scratch: Path, block_caches: bool) -> Iterator[tuple[str, Action]]:
    starts = [random.Random(1).randrange(BIG - 65536) for _ in range(64)]
    ends = [start + 65536 for start in starts]
    small = [f"{root}/small/{number}" for number in range(1000)]
    options = {"cache_type": "readahead"} if block_caches else {}

    def in_order() -> None:
        with fs.open(f"{root}/big", "rb", **options) as file:
            while file.read(MIB):
                pass

    def lines() -> int:
        with fs.open(f"{root}/lines", "rb", **options) as file:
            return sum(1 for _ in file)

    yield "cat_ranges 64 x 64 KiB", lambda: fs.cat_ranges([f"{root}/big"] * 64, starts, ends)
    yield "cat 1,000 x 4 KiB", lambda: fs.cat(small)
    yield "open, read 256 MiB by 1 MiB", in_order
    yield "open, read whole 256 MiB", lambda: fs.open(f"{root}/big", "rb", **options).read()
    yield "open, 200,000 lines", lines
    yield "get 256 MiB", lambda: fs.get_file(f"{root}/big", str(scratch / "got"))


def _writes(
    fs: Any, root: str, source: Path, fresh: Callable[[int], bytearray], sync: bool
) -> Iterator[tuple[str, Action]]:
    def settle(path: str) -> None:
        if sync:
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def put() -> None:
        fs.put_file(str(source), f"{root}/put")
        settle(f"{root}/put")

    def write() -> None:
        content = fresh(BIG)
        with fs.open(f"{root}/written", "wb") as file:
            for at in range(0, BIG, MIB):
                file.write(memoryview(content)[at : at + MIB])
        settle(f"{root}/written")

    yield "put 256 MiB", put
    yield "open, write 256 MiB by 1 MiB", write


def _prepare(fs: Any, root: str) -> None:
    rng = random.Random(2)
    fs.makedirs(f"{root}/small", exist_ok=True)
    fs.pipe(f"{root}/big", b"".join(rng.randbytes(MIB) for _ in range(BIG // MIB)))
    fs.pipe({f"{root}/small/{number}": rng.randbytes(4096) for number in range(1000)})
    fs.pipe(f"{root}/lines", b"0123456789,abcdefghij,0.5\n" * 200_000)


def _checkpoints(lake_root: str, local_root: str) -> list[tuple[str, str, Action]]:
    if importlib.util.find_spec("torch") is None:
        return []
    torch = importlib.import_module("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    state = {f"layer{number}": torch.randn(CHECKPOINT // 64 // 4) for number in range(64)}

    def save(place: str) -> None:
        for tensor in state.values():
            tensor.add_(1.0)
        dcp.save(state, checkpoint_id=place)

    return [
        ("DCP save 512 MiB", "lake", lambda: save(f"lake://{lake_root}/checkpoint")),
        ("DCP save 512 MiB", "file", lambda: save(f"{local_root}/checkpoint")),
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name, serving(Path(name) / "served") as engine:
        os.environ["LAKE_SERVER"] = engine.server
        folder = Path(name)
        lake, local = LakeFileSystem(server=engine.server), fsspec.filesystem("file")
        lake.mkdir("bench")
        (folder / "local").mkdir()
        source = folder / "source"
        scratch = {kind: folder / kind for kind in ("of-lake", "of-file")}
        for place in scratch.values():
            place.mkdir()
        counter = iter(range(1 << 30))

        def fresh(size: int) -> bytearray:
            content = bytearray(random.Random(next(counter)).randbytes(4096)) * (size // 4096)
            for at in range(0, size, MIB):  # no chunk is in the store yet
                content[at : at + 8] = random.randbytes(8)
            return content

        root = str(folder / "local")
        _prepare(lake, "bench")
        _prepare(local, root)
        actions = [
            *((what, "lake", action) for what, action in _reads(lake, "bench", scratch["of-lake"], False)),
            *((what, "file", action) for what, action in _reads(local, root, scratch["of-file"], False)),
            *((what, "lake", action) for what, action in _writes(lake, "bench", source, fresh, False)),
            *((what, "file", action) for what, action in _writes(local, root, source, fresh, True)),
            *((what, "file, no sync", action) for what, action in _writes(local, root, source, fresh, False)),
            *_checkpoints("bench", root),
        ]
        took: dict[str, dict[str, list[float]]] = {}
        for _ in range(options.rounds):
            for what, who, action in actions:
                source.write_bytes(fresh(BIG))
                begin = time.perf_counter()
                action()
                took.setdefault(what, {}).setdefault(who, []).append(time.perf_counter() - begin)
            lake.lake.gc()
        for what, by in took.items():
            medians = {who: statistics.median(times) for who, times in by.items()}
            shown = "  ".join(f"{who} {median * 1e3:8.1f} ms" for who, median in medians.items())
            print(f"{what:30} {shown}  lake/file {medians['lake'] / medians['file']:.2f}")
        shutil.rmtree(folder / "local")


if __name__ == "__main__":
    main()
