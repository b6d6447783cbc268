"""Native modules that were not built: clients ask the engine instead, and an engine says what it needs."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.mount_rig import mount_rig
from tests.e2e.served import Served, environment, lake

WITHOUT = """
import sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None  # an import of it fails, as where it was not built
sys.argv[1:] = sys.argv[2:]
"""
CLIENT = (
    WITHOUT
    + """
import lakefs, trio
from lakefs.ids import data_chunk_id

content = [bytes([number]) * 70_000 for number in range(8)]
ids = [data_chunk_id(part) for part in content]
with lakefs.connect() as lake:
    for number, part in enumerate(content):
        lake.put(f"bkt/{number}", part, create_bucket=True)
    for _ in range(3):
        assert lake.chunks.get_many(ids) == content
        assert lake.get_many([f"bkt/{number}" for number in range(8)]) == content
        with lake.pool(size_bytes=1 << 20) as pool:
            lake.load_many(ids, pool, [100_000 * number for number in range(8)])
            assert [bytes(pool.buffer[at : at + 70_000]) for at in range(0, 800_000, 100_000)] == content

async def main():
    async with lakefs.connect_trio() as lake:
        assert await lake.chunks.get_many(ids) == content

trio.run(main)
"""
)


@pytest.mark.parametrize(
    "names",
    [
        "lakefs.shared_index._table",
        "lakefs.grants._batch_plan",
        "lakefs.stamps._stamps",
        "lakefs.known._known",
        "lakefs.shared_index._keys",
    ],
)
def test_a_client_without_native_modules_asks_the_engine(served: Served, names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, names],
        env=environment(served.server),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name",
    [
        "lakefs.stamps._stamps",
        "lakefs.shared_index._keys",
        "lakefs.cluster._erasure",
        "engine.host._io_uring",
        "engine.memory._cache_lines",
    ],
)
def test_an_engine_without_a_native_module_that_has_a_substitute_stores(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{WITHOUT}\nfrom cli.main import main\nmain()",
            name,
            *("put", "--data", tmp_path / "data", "-", "bkt/a"),
        ],
        env=environment(),
        input=b"content",
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["engine.format._granules", "engine.tables._frequency", "lakefs.shared_index._table"])
def test_an_engine_does_not_start_without_its_native_modules_and_says_what_to_do(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{WITHOUT}\nfrom cli.main import main\nmain()",
            name,
            *("serve", "--data", tmp_path / "data", "--socket", tmp_path / "socket", "--s3", "off"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    assert done.stderr.startswith(f"lake: the native module {name} is not built")
    assert "install a C compiler" in done.stderr
    assert not (tmp_path / "data").exists()


def test_without_its_native_module_no_dax_device_is_used() -> None:
    opened = """
from pathlib import Path
from engine.memory.dax_device import DaxDevice
from lakefs.errors import ConfigError
try:
    DaxDevice(Path("/dev/dax0.0"), 0, 1)
except ConfigError as error:
    print(error)
"""
    command = [sys.executable, "-c", WITHOUT + opened, "engine.memory._cache_lines"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.stdout == "hot_index: /dev/dax0.0: cache lines cannot be written back here\n", done.stderr


@pytest.mark.fuse
def test_a_mount_without_its_native_module_reads_writes_and_appends(served: Served) -> None:
    without = [sys.executable, "-c", f"{WITHOUT}\nfrom cli.main import main\nmain()", "fuse.native._layer"]
    assert lake("put", "-", "bkt/first", server=served.server).code == 0
    with mount_rig(without, served.server) as rig:
        rig.mount()
        file = rig.place / "bkt" / "file"
        content = bytes(range(256)) * 20_000
        file.write_bytes(content)
        assert file.read_bytes() == content
        with file.open("ab") as appended:
            appended.write(b"more")
        assert file.read_bytes() == content + b"more"
        assert rig.lake("unmount", rig.place).code == 0
    assert lake("get", "bkt/file", "-", server=served.server).out == content + b"more"


@pytest.mark.parametrize("name", ["engine.format._granules", "engine.tables._frequency", "lakefs.shared_index._table"])
def test_doctor_names_a_module_that_the_engine_needs_and_ends_its_report(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{WITHOUT}\nfrom cli.main import main\nmain()",
            name,
            *("--data", tmp_path / "data", "doctor"),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78, done
    assert f"fail  native modules   {name}: not built, the engine does not start" in done.stdout
    assert f"first failure: native modules: {name}" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", ["gateway.http._door", "gateway.s3.door._repeater", "lakefs.stamps._stamps"])
def test_s3_without_a_door_answers(tmp_path: Path, name: str) -> None:
    command = [sys.executable, "-c", f"{WITHOUT}\nfrom cli.main import main\nmain()", name]
    faces = ("serve", "--data", tmp_path / "data", "--socket", tmp_path / "socket", "--s3", "127.0.0.1:0")
    with subprocess.Popen(
        [*command, *faces, "--admin", "off"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as engine:
        try:
            assert engine.stdout is not None
            printed = list(iter(engine.stdout.readline, "ready\n"))
            port = int(re.findall(r"http://127\.0\.0\.1:(\d+)", "".join(printed))[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            for _ in range(2):
                connection.request("GET", "/bucket/key")
                answer = connection.getresponse()
                assert (answer.status, b"NoSuchBucket" in answer.read()) == (404, True)
            connection.close()
        finally:
            engine.terminate()
            engine.communicate()
    assert engine.returncode == 0
