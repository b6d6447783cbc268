"""Causes that keep an engine from starting, or a client from reaching it: each has its message, and nothing is lost."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lakefs.client.blocking.engine import connect_blocking
from lakefs.client.connect import connect
from lakefs.errors import UnsupportedVersion
from lakefs.wire.connection import ClientConnection, ClientEvent, FailureReceived, ReplyReceived
from lakefs.wire.frames import PROTOCOL_VERSION
from lakefs.wire.messages import Hello, HelloReply
from tests.e2e.served import LAKE, ROOT, Finished, Served, environment, lake, serving
from tests.e2e.small_disk import ext4, remount

pytestmark = pytest.mark.thorough

NOBODY = 65534
NO_PORTS = ("--admin", "off", "--s3", "off")


def serve(data: Path, sock: Path, *options: str) -> Finished:
    """Run an engine that must end by itself."""
    return lake("serve", "--data", data, "--socket", sock, *NO_PORTS, *options)


# --- addresses -----------------------------------------------------------------------------------------


def test_a_taken_socket_or_port_is_told_and_what_listens_there_is_left_alone(served: Served, folder: Path) -> None:
    served.good("put", "-", "ports/x", stdin=b"x")
    taken = serve(folder / "other", served.socket)
    assert taken.code == 71, taken
    assert str(served.socket) in taken.err
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = f"127.0.0.1:{listener.getsockname()[1]}"
        for option in ("--native", "--admin"):
            refused = serve(folder / "other", folder / "s", option, port)
            assert refused.code == 71, refused
            assert port in refused.err
            assert "bug" not in refused.err
    assert served.good("cat", "ports/x").out == b"x"
    assert not (folder / "s").exists()


def test_a_limit_of_address_space_is_told_with_what_is_needed_and_what_to_do(folder: Path) -> None:
    """With `ulimit -v` or LimitAS=: the index is mapped into terabytes, but uses memory only for what is in it."""
    data = folder / "store"
    assert lake("put", "-", "kept/x", "--data", data, stdin=b"x").code == 0
    for limit_kib, command in (
        (8_000_000, f"serve --data {data} --socket {folder}/s --admin off --s3 off"),
        ((1 << 32) + 150_000, f"ls --data {data}"),
        (8_000_000, f"fsck --data {data} --repair"),
    ):
        done = subprocess.run(
            ["sh", "-c", f"ulimit -v {limit_kib}; exec {shlex.join(LAKE)} {command}"],
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert (done.returncode, done.stdout) == (2 if "fsck" in command else 78, ""), done
        assert "needs 12884901888 KiB of address space" in done.stderr, command
        assert f"this process may have {limit_kib} KiB" in done.stderr, command
        assert "ulimit -v unlimited" in done.stderr, command
        assert "LimitAS=" in done.stderr, command
    assert lake("cat", "kept/x", "--data", data).out == b"x"
    assert not (data / "set-aside").exists()


def test_places_that_can_hold_no_socket_or_no_store_are_told(folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    cases = [
        (folder / "data", folder / "file" / "missing" / "s"),
        (folder / "data", folder / ("long" * 40)),
        (folder / "data", folder / "file"),
        (folder / "file", folder / "s"),
        (Path("/proc/lake"), folder / "s"),
    ]
    for data, sock in cases:
        done = serve(data, sock)
        assert done.code not in (0, 70), done
        told = done.err.splitlines()[-1]
        assert told.startswith("lake: "), done
        assert str(data) in told or str(sock) in told, done
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert (folder / "file").read_bytes() == b""


def test_an_engine_of_another_protocol_version_is_told_apart(served: Served) -> None:
    told = greeted_with(served, 0)
    assert isinstance(told, FailureReceived)
    assert isinstance(told.error, UnsupportedVersion)
    assert "protocol 0" in told.error.message
    assert "update the client" in told.error.message
    # A newer client gets the versions that this engine speaks, and decides.
    answered = greeted_with(served, 99)
    assert isinstance(answered, ReplyReceived)
    assert isinstance(answered.message, HelloReply)
    assert answered.message.protocol == PROTOCOL_VERSION
    connect_blocking(served.server).close()


def greeted_with(served: Served, protocol: int) -> ClientEvent:
    """Return the engine's answer to a client of that version."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(served.socket))
        wire = ClientConnection()
        _, frame = wire.request(Hello(protocol, "another"))
        sock.sendall(frame)
        while (event := wire.next_event()) is None:
            wire.reader.received(sock.recv_into(wire.reader.space()))
        return event


# --- who may ----------------------------------------------------------------------------------------------


def as_nobody(*args: str, server: str) -> Finished:
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("another user can be tried only as root, with setpriv (package util-linux)")
    done = subprocess.run(
        ["setpriv", f"--reuid={NOBODY}", "--clear-groups", *LAKE, *args],
        env=environment(server),
        cwd=ROOT,
        capture_output=True,
    )
    return Finished(done.returncode, done.stdout, done.stderr.decode())


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_another_user_is_refused_by_the_socket_and_by_the_engine(folder: Path, mode: int) -> None:
    with serving(folder) as engine:
        folder.chmod(0o755)
        engine.socket.chmod(mode)
        refused = as_nobody("ls", server=engine.server)
        assert refused.code == 77, refused
        assert "may not" in refused.err
        assert "group" in refused.err
        assert engine.good("ls").code == 0


def test_a_folder_of_another_user_is_told(folder: Path) -> None:
    data = folder / "store"
    with serving(folder):
        pass
    folder.chmod(0o755)
    refused = as_nobody("ls", "--data", str(data), server="unix:/nowhere")
    assert refused.code not in (0, 70), refused
    assert "not readable" in refused.err or "ermission denied" in refused.err
    assert str(data) in refused.err


# --- one store, one process -------------------------------------------------------------------------------


def test_of_many_first_starts_at_once_one_serves_and_the_others_say_why(folder: Path) -> None:
    data = folder / "store"
    starts = [
        subprocess.Popen(
            [*LAKE, "serve", "--data", str(data), "--socket", str(folder / str(number)), *NO_PORTS],
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    ready: list[int] = []
    one_is_ready = threading.Event()

    def watch(number: int) -> None:
        stdout = starts[number].stdout
        assert stdout is not None
        for line in stdout:
            if line == "ready\n":
                ready.append(number)
                one_is_ready.set()

    watchers = [threading.Thread(target=watch, args=(number,)) for number in range(4)]
    for watcher in watchers:
        watcher.start()
    while len(running := [number for number, start in enumerate(starts) if start.poll() is None]) > 1:
        time.sleep(0.02)
    (winner,) = running
    assert one_is_ready.wait(60)
    with connect(f"unix:{folder / str(winner)}") as client:
        client.put("bkt/x", b"content", create_bucket=True)
    starts[winner].send_signal(signal.SIGTERM)
    for number, start in enumerate(starts):
        _, told = start.communicate()
        assert start.returncode == (0 if number == winner else 75), told
        assert number == winner or "open in another process" in told
    for watcher in watchers:
        watcher.join()
    assert ready == [winner]
    assert lake("cat", "--data", data, "bkt/x").out == b"content"


@pytest.mark.parametrize("moment", ["pread", "rename", "fsync", "fdatasync", "mkdir", "fallocate"])
def test_a_first_start_killed_anywhere_can_be_repeated(folder: Path, moment: str) -> None:
    """The first start is killed at its first system call of a kind; the next one makes the store whole."""
    script = (
        "import os, signal, sys, threading\n"
        "from engine.host import local_disk as disk\n"
        "seen = []\n"
        f"name = {moment!r}\n"
        "def killing(original):\n"
        "    def call(*args, **options):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return call\n"
        "target = disk if name == 'fallocate' else os\n"
        "attribute = {'pread': 'preadv', 'mkdir': 'mkdir', 'fallocate': '_fallocate'}.get(name, name)\n"
        "setattr(target, attribute, killing(getattr(target, attribute)))\n"
        "off = ['--admin', 'off', '--s3', 'off']\n"
        "sys.argv = ['lake', 'serve', '--data', sys.argv[1], '--socket', sys.argv[2], *off]\n"
        "from cli.main import main\n"
        "main()\n"
    )
    arguments = [sys.executable, "-c", script, str(folder / "store"), str(folder / "s")]
    done = subprocess.run(arguments, env=environment(), cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done
    with serving(folder) as engine:
        engine.good("put", "-", "bkt/x", stdin=b"content")
        assert engine.good("cat", "bkt/x").out == b"content"
        assert engine.good("fsck", "--full").code == 0


# --- copies -----------------------------------------------------------------------------------------------


def test_a_copied_store_opens_beside_the_original_with_an_engine_id_of_its_own(folder: Path) -> None:
    (folder / "copy").mkdir()
    with serving(folder) as engine:
        engine.good("put", "-", "bkt/x", stdin=b"before the copy")
        original = ids_of(engine)
        engine.stop()
        shutil.copytree(engine.data, folder / "copy" / "store")
        engine.start()
        with serving(folder / "copy") as copy:
            assert ids_of(copy)[0] == original[0]
            assert ids_of(copy)[1] != original[1]
            assert ids_of(engine) == original
            copy.good("put", "-", "bkt/x", stdin=b"changed in the copy")
            assert engine.good("cat", "bkt/x").out == b"before the copy"
            of_copy = ids_of(copy)
            copy.stop()
            copy.start()
            assert ids_of(copy) == of_copy
    told = lake("ls", "--data", folder / "copy" / "store")
    assert (told.text, told.err) == ("bkt\n", "")
    shutil.copytree(engine.data, folder / "again")
    warned = lake("ls", "--data", folder / "again")
    assert warned.text == "bkt\n"
    assert "copied" in warned.err
    assert "new engine id" in warned.err


def ids_of(engine: Served) -> tuple[str, str]:
    with connect(engine.server) as client:
        status = client.status()
    return status["store_id"], status["engine_id"]


# --- disks that do not take it ------------------------------------------------------------------------------


def test_a_read_only_file_system_is_told_and_the_store_is_as_it_was(folder: Path) -> None:
    with ext4(folder, 64 << 20) as disk:
        with serving(disk) as engine:
            engine.good("put", "-", "bkt/x", stdin=b"content")
            data = engine.data
        remount(disk, "ro")
        refused = serve(data, folder / "s")
        assert refused.code == 74, refused
        assert "read-only" in refused.err
        assert "remount" in refused.err
        first = serve(disk / "new", folder / "s")
        assert first.code == 74, first
        assert "ead-only file system" in first.err
        remount(disk, "rw")
        with serving(disk) as engine:
            assert engine.good("cat", "bkt/x").out == b"content"


def test_a_disk_that_turns_read_only_under_an_engine_still_serves_reads(folder: Path) -> None:
    with ext4(folder, 64 << 20, "errors=remount-ro") as disk:
        trigger = trigger_of(disk)
        engine = Served(disk)
        try:
            content = os.urandom(300_000)
            engine.good("put", "-", "bkt/x", stdin=content)
            trigger.write_text("lake test")
            refused = engine("put", "-", "bkt/y", stdin=b"y")
            assert refused.code == 74, refused
            assert any(why in refused.err for why in ("takes no writes", "read-only", "no write is accepted")), refused
            assert engine.good("cat", "bkt/x").out == content
            status = engine("status")
            assert status.code == 74, status
            assert "read-only" in status.text
        finally:
            engine.kill()


def trigger_of(disk: Path) -> Path:
    """Return a file: a write to it makes the kernel act as if the file system had an error."""
    source = subprocess.run(["findmnt", "-no", "SOURCE", str(disk)], capture_output=True, text=True).stdout
    trigger = Path("/sys/fs/ext4") / Path(source.strip()).name / "trigger_fs_error"
    if not trigger.exists():
        pytest.skip("this kernel offers no way to make ext4 turn read-only")
    return trigger
